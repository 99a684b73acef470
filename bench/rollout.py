"""The real thing: the twin's workloads in real time, beside the vector environments that users have.

Hypothesis: what the twin says holds on a computer. With simulators that sleep and a policy that sleeps, greedy
launching, lock-step and the best threshold stand to the tuner as they do in virtual time, within 10 %; and where steps
vary or resets are slow, EBRL is far ahead of Gymnasium's `AsyncVectorEnv`, which waits for all, and ahead of tianshou's
vector environment, which waits for some, and for every reset.

The same runtime, schedulers, simulators and seeds run in both kinds of time; lock-step is a threshold of all. The best
threshold is that of the twin's sweep. Runs of one workload follow each other, in an order that rotates. What the twin
leaves out is what a computer takes to wake threads: it shows where all wake at once, which is lock-step on W1.

    python -m bench.rollout --suite W --json
    python -m bench.rollout --suite W --burn --policy torch --json

With ``--burn`` simulators keep cores busy instead of sleeping, and share those of this computer; with ``--policy
torch`` a network computes in every batch. The bars are about sleeping only, so that they hold whatever the computer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from bench.real import Ask, Setting, Span
from bench.report import COUNT, SECONDS, Number, command, finish, parser
from bench.suites import Result, real_cpu, real_w
from ebrl.core.errors import ConfigError

SUITES: Mapping[str, Callable[[Ask], Result]] = {"W": real_w.suite, "cpu": real_cpu.suite}


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    setting = Setting(args.burn, args.policy)
    if args.suite != "W" and setting != Setting():
        raise ConfigError(f"--burn and --policy are for --suite W; in --suite {args.suite} all of it computes")
    span, repeats = (Span(0.1, 0.2), 1) if args.smoke else (Span(args.warmup, args.seconds), args.repeats)
    ask = Ask(args.seed, args.smoke, span, repeats, setting)
    checks, data = [], {}
    for name in list(SUITES) if args.smoke else [args.suite]:
        result = SUITES[name](ask)
        print("\n".join(result.lines))
        checks += result.checks
        data[name] = result.data
    return finish("rollout", args, checks, data)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--suite", choices=list(SUITES), default="W", help="what is asked; --smoke runs all of them")
    made.add_argument(
        "--warmup", type=Number(float, 0, 86_400), default=10.0, help="seconds of every run that do not count"
    )
    made.add_argument("--seconds", type=SECONDS, default=30.0, help="seconds of every run that do")
    made.add_argument("--repeats", type=COUNT, default=1, help="of every run, interleaved")
    made.add_argument("--burn", action="store_true", help="simulators use cores instead of sleeping")
    made.add_argument("--policy", choices=["sleep", "torch"], default="sleep", help="what a batch does")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
