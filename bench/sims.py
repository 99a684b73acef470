"""Where simulators should run, and whether ``host="auto"`` finds that out.

Hypothesis: what runs faster, two threads or two processes, differs from simulator to simulator, and a trial of about a
second tells which: the place that `auto` chooses does at least 0.9 of the steps of the better one. And whoever burns
Python in a process does not hold up the loop: beside it, 99 % of what is due comes within 5 ms.

Each simulator is measured in a process of its own. Steps per second of one thread, two threads and two processes are
those of groups as users have them, with a generator whose policy costs little and a trainer whose learner computes as
much as that of a small policy; so they are not measured as in the trial of `auto`. They take turns, in which they play
whole episodes; episodes are short, so that resets have their share in every repetition. How late the loop is, is
measured where it has nothing to do, beside one simulator that steps and that resets, in a thread and in a process; and
memory, of a process with one and with two of them. Simulators that are not installed are left out and named;
``make test-sims`` makes an environment with all of them. Not for machines without ``/proc``.

    python -m bench.sims --json
    python -m bench.sims --only LIBERO
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any, TypeVar

from bench.hosted import Burning
from bench.hosting import Case, Found, measure
from bench.report import COUNT, SECONDS, Check, at_least, at_most, command, finish, parser, show, spread
from bench.runs import end_with_parent
from ebrl.sim.fake import ScriptedEnv

T = TypeVar("T")
BURNING = "burning"
CASES: Mapping[str, Case] = {
    "Meta-World": Case("Meta-World/MT1", options={"env_name": "drawer-open-v3"}),
    "LIBERO": Case("LIBERO/libero_spatial", options={"task_id": 2}),
    "ManiSkill": Case("ManiSkill/PickCube-v1"),
    "robosuite": Case("robosuite/Lift"),
    "Meta-World RGB": Case(
        "Meta-World/MT1", 50, {"env_name": "drawer-open-v3", "cameras": "corner2", "fast_render": True}
    ),
    "LIBERO RGB": Case("LIBERO/libero_spatial", 50, {"task_id": 2, "cameras": "agentview", "fast_render": True}),
    "HalfCheetah": Case("HalfCheetah-v5"),
    "sleeping": Case(ScriptedEnv, options={"latency_s": 0.005}),
    BURNING: Case(Burning),
}
SMOKE = ("HalfCheetah", BURNING)
CHOICE_BAR = 0.9
LAG_BAR_MS = 5.0


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    seconds, repeats = (0.05, 1) if args.smoke else (args.seconds, args.repeats)
    checks: list[Check] = []
    data: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, case in CASES.items():
        if args.smoke and name not in SMOKE:
            left_out[name] = "a smoke run is short"
        elif args.only not in (None, name):
            left_out[name] = f"--only {args.only}"
        else:
            found = in_own_process(measure, case, seconds, repeats, args.seed)
            if isinstance(found, str):
                left_out[name] = found
            else:
                checks += judge(name, found)
                data[name] = tell(name, found)
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    return finish("sims", args, checks, {**data, "left_out": left_out})


def in_own_process(fn: Callable[..., T], *args: Any) -> T:
    """Return what `fn` returns in a process that nothing has run in before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        return pool.submit(fn, *args).result()


def of_better(found: Found) -> float:
    """Return the steps of the place that was chosen over those of the better one."""
    median = {name: spread(rates)["median"] for name, rates in found.rates.items()}
    threads, processes = median["2 threads"], median["2 processes"]
    return (threads if found.choice.host == "thread" else processes) / max(threads, processes)


def judge(name: str, found: Found) -> list[Check]:
    """Return the bars."""
    checks = [at_least(f"{name}: steps where auto runs it / where they are most", of_better(found), CHOICE_BAR)]
    if name == BURNING:
        _, p99 = found.lags_ms["process"]["step"]
        checks.append(at_most("ms that the loop is late (p99) beside a process that burns Python", p99, LAG_BAR_MS))
    return checks


def tell(name: str, found: Found) -> dict[str, Any]:
    """Print what was found, and return it for the record."""
    rates = {what: spread(values) for what, values in found.rates.items()}
    print(f"{name}: " + ", ".join(f"{what} {show(numbers)}" for what, numbers in rates.items()) + " steps/s")
    for place, lags in found.lags_ms.items():
        parts = [f"{p50:,.1f} and {p99:,.1f} while it {what}s" for what, (p50, p99) in lags.items()]
        print(f"  loop late by ms (p50 and p99) beside one {place}: {', '.join(parts)}")
    print(f"  {found.process_mib:.0f} MiB for a process, {found.further_mib:.0f} for a further simulator in it")
    print(f"  auto: {found.choice}; {of_better(found):.2f} of the better place")
    return {
        "steps_per_s": rates,
        "lags_ms": found.lags_ms,
        "process_mib": found.process_mib,
        "further_mib": found.further_mib,
        "auto": {**asdict(found.choice), "of_better": of_better(found)},
    }


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--seconds", type=SECONDS, default=2.5, help="of each measurement, or longer, to the end of an episode"
    )
    made.add_argument("--repeats", type=COUNT, default=5, help="of each rate, in turn")
    made.add_argument("--only", choices=list(CASES), help="one simulator")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
