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

The last one has no bars: it shows what schedulers do with what ``ebrl probe`` or a run has measured on a machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.plot import bars, check_picture
from bench.report import finish, parser, positive
from bench.runs import check_scheduler
from bench.suites import Ask, Suite, drawn, drift, paper, probed, w
from ebrl.core.errors import ConfigError, EbrlError

SEPARATOR = re.compile(r",(?=[a-z])")  # settings have commas too
SUITES: Mapping[str, Suite] = {"W": w.suite, "random": drawn.suite, "drift": drift.suite, "paper": paper.suite}


def main() -> int:
    args = arguments()
    try:
        return answer(args)
    except EbrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def answer(args: argparse.Namespace) -> int:
    schedulers = tuple(filter(None, SEPARATOR.split(args.schedulers)))
    for name in schedulers:
        check_scheduler(name)
    if schedulers and args.suite != "W" and not args.profile:
        raise ConfigError(f"--schedulers is for --suite W and --profile; --suite {args.suite} has its own")
    if args.plot:
        check_picture(args.plot)
    ask = Ask(args.seed, args.smoke, args.seeds, schedulers, args.profile, args.num_envs, args.chunk)
    suites = {"profile": probed.suite} if args.profile else SUITES
    chosen = list(suites) if args.smoke or args.profile else [args.suite]
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


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--suite", choices=list(SUITES), default="W", help="what is asked; --smoke runs all of them")
    made.add_argument("--seeds", type=positive, default=40, help="draws of the random suite")
    made.add_argument(
        "--schedulers",
        default="",
        help="others to run beside, with commas: see bench/baselines; with --suite W or --profile",
    )
    made.add_argument("--profile", default="", help="file of `ebrl probe` or of a run: shows that, and no other suite")
    made.add_argument("--num-envs", type=positive, default=16, help="environments, with --profile")
    made.add_argument("--chunk", type=positive, default=1, help="environment steps of a decision, with --profile")
    made.add_argument("--plot", default="", help="file for a picture of the result; others get its name and their own")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
