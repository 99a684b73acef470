"""The twin: the unmodified runtime, batcher, tuner and assembler on modelled hardware, beside other schedulers.

Hypothesis: one tuner that knows nothing at its start is as good as the best setting that a sweep finds for each
workload, where greedy launching and lock-step each fail on some; it follows when the workload changes; and on models of
today's embodied workloads it is well ahead of the systems that users have. Which bar belongs to what is said in
`bench/suites`. Time is virtual and latencies are paired, so that equal seeds give equal numbers on any computer.

    python -m bench.twin --suite W --json
    python -m bench.twin --suite random --seeds 40 --json
    python -m bench.twin --suite drift --json
    python -m bench.twin --suite paper --json
    python -m bench.twin --suite W --schedulers pipeline:2,size-timeout:16,0.02 --plot twin.png
    python -m bench.twin --profile profile.json --num-envs 64

The last one has no bars: it shows what schedulers do with what ``ebrl probe`` or a run has measured on a machine. What
is shown of a run is said in `bench/shown.py`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.plot import bars, check_picture
from bench.report import COUNT, command, finish, parser
from bench.runs import check_scheduler
from bench.suites import Ask, Suite, drawn, drift, paper, probed, w
from ebrl.core.errors import ConfigError

SEPARATOR = re.compile(r",(?=[a-z])")  # settings have commas too
SUITES: Mapping[str, Suite] = {"W": w.suite, "random": drawn.suite, "drift": drift.suite, "paper": paper.suite}
USES = {
    "suite": ("the workloads of bench/profiles", ("W", "random", "drift", "paper")),
    "seeds": ("--suite random", ("random",)),
    "schedulers": ("--suite W and --profile", ("W", "")),
    "num_envs": ("--profile", ("",)),
    "chunk": ("--profile", ("",)),
}
"""Options by what they are for, in words and as suites; the empty one is that of a profile."""


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if value is not None}
    suite = "" if args.profile else args.suite or "W"
    check_use(suite, given)
    schedulers = tuple(filter(None, SEPARATOR.split(args.schedulers or "")))
    for name in schedulers:
        check_scheduler(name)
    if args.plot:
        check_picture(args.plot)
    asked = {name: given[name] for name in ("seeds", "profile", "num_envs", "chunk") if name in given}
    ask = Ask(args.seed, args.smoke, schedulers=schedulers, **asked)
    suites = {"profile": probed.suite} if args.profile else SUITES
    chosen = list(suites) if args.smoke or args.profile else [suite]
    checks, data = [], {}
    for name in chosen:
        result = suites[name](ask)
        print("\n".join(result.lines))
        checks += result.checks
        data[name] = result.data
        for picture in result.pictures if args.plot else ():
            path = Path(args.plot)
            stem = "-".join(filter(None, (path.stem, name if len(chosen) > 1 else "", picture.name)))
            bars(picture, str(path.with_stem(stem)), f"twin, suite {name}")
    return finish("twin", args, checks, data)


def check_use(suite: str, given: Mapping[str, object]) -> None:
    """Raise a `ConfigError` if an option was given that would not be looked at; `suite` is empty with a profile."""
    for name, (use, suites) in USES.items():
        if name in given and suite not in suites:
            here = f"--suite {suite}" if suite else "--profile"
            raise ConfigError(f"--{name.replace('_', '-')} is for {use}, not for {here}")


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--suite", choices=list(SUITES), help="what is asked (W); --smoke runs all of them")
    made.add_argument("--seeds", type=COUNT, help=f"draws of the random suite ({Ask.seeds})")
    made.add_argument(
        "--schedulers",
        help="others to run beside, with commas: see bench/baselines; with --suite W or --profile",
    )
    made.add_argument("--profile", help="file of `ebrl probe` or of a run: shows that, and no other suite")
    made.add_argument("--num-envs", type=COUNT, help=f"environments, with --profile ({Ask.num_envs})")
    made.add_argument("--chunk", type=COUNT, help=f"environment steps of a decision, with --profile ({Ask.chunk})")
    made.add_argument("--plot", help="file for a picture of the result; others get its name and their own")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
