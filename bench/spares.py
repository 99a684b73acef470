"""What spare simulators are worth that are reset ahead, and when.

Hypothesis: on W4, where an episode of 25 to 75 steps of 10 ms is followed by a reset of half a second, 16 spares beside
32 environments make 1.3 times as many steps per second as none, or more, in virtual and in real time. So many more
environments do the same and a little better: 48 plain ones are in the table. So spares are for where the number of
environments is fixed, or where more of them do not help. Rows ``quota`` show that: batches have 384 decisions, an equal
share of every environment, and all wait for whoever is being reset.

Spares take cores and memory as environments do, and win nothing where cores are the limit: rows ``cores``.

Simulators and policy take modelled time: they sleep in real time, and add it to the clock of the twin. Every simulator
has a core, but in the last rows. Runs in real time take turns.

    python -m bench.spares --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.hardware import Conditions
from bench.loading import load_w
from bench.real import Span, Window
from bench.report import COUNT, SECONDS, at_least, command, finish, parser, spread
from bench.rig import Rig
from ebrl import VirtualMachine, run, run_virtual
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine

BAR = 1.3
TWIN = Span(10.0, 100.0)


@dataclass(frozen=True)
class Case:
    """What runs.

    Attributes:
        num_envs: N.
        spares: K.
        num_cores: For the simulators of both.
        quota: Decisions of every environment in each batch, which all wait for; 0: whoever decides first has more.
    """

    num_envs: int
    spares: int
    num_cores: int
    quota: int = 0

    @property
    def name(self) -> str:
        return f"{self.num_envs} + {self.spares}" if self.spares else str(self.num_envs)


@dataclass(frozen=True)
class Found:
    """What came of it: environment steps per second, and the part of resets that were ready and waited for."""

    speed: float
    ready: float
    waited: float


def cases(scale: int) -> dict[str, list[Case]]:
    """Return all that runs, by row of the table; the first of a row is what the others are compared with.

    Args:
        scale: A quarter of N.
    """
    num, more = 4 * scale, 6 * scale  # environments, and simulators in all
    counts = (0, scale // 2, scale, 2 * scale, 4 * scale)
    return {
        "free": [*(Case(num, spares, 2 * num) for spares in counts), Case(more, 0, 2 * num)],
        "quota": [*(Case(num, spares, 2 * num, 12) for spares in (0, 2 * scale, num)), Case(more, 0, 2 * num, 8)],
        "cores": [Case(num, 0, num // 2), Case(num, 2 * scale, num // 2), Case(more, 0, num // 2)],
    }


async def measure(machine: Machine, case: Case, span: Span, seed: int) -> Found:
    window = Window(span)
    rig = Rig(Conditions(load_w("W4", case.num_envs)), window, machine, seed, spares=case.spares)
    window.open()
    await rig.run(quota=case.quota)
    num = max(1.0, sum(rig.resets.values()))
    return Found(window.speed(), rig.resets["resets_ready"] / num, rig.resets["resets_waited"] / num)


def twin(case: Case, span: Span, seed: int) -> Found:
    return run_virtual(measure(VirtualMachine({}, num_cores=case.num_cores), case, span, seed))


def real(row: Sequence[Case], span: Span, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Run some in real time, one after the other and again; return speeds and ratios to the first, as spreads."""
    runs = [[run(measure(LocalMachine(case.num_cores), case, span, seed)) for case in row] for _ in range(repeats)]
    return [
        {
            "speed": spread([found[i].speed for found in runs]),
            "ratio": statistics.median([found[i].speed / found[0].speed for found in runs]),
        }
        for i in range(len(row))
    ]


def tell(row: str, case: Case, virtual: Mapping[str, float], actual: Mapping[str, Any] | None) -> str:
    """Return a line of the table."""
    text = f"{row:6} {case.name:>8} {case.num_cores:6} {virtual['speed']:10.0f} {virtual['ratio']:6.2f}"
    text += f" {virtual['ready']:8.0%} {virtual['waited']:6.0%}"
    if actual is None:
        return text
    speed = actual["speed"]
    return f"{text} {speed['median']:10.0f} [{speed['min']:.0f} .. {speed['max']:.0f}] {actual['ratio']:6.2f}"


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--warmup", type=SECONDS, default=4.0, help="seconds of every run in real time that do not count")
    made.add_argument("--seconds", type=SECONDS, default=12.0, help="seconds of them that do")
    made.add_argument("--repeats", type=COUNT, default=3, help="of every run in real time")
    return made.parse_args()


def answer(args: argparse.Namespace) -> int:
    scale, repeats = (2, 1) if args.smoke else (8, args.repeats)
    virtual_span, span = (Span(0.1, 1.0), Span(0.1, 0.5)) if args.smoke else (TWIN, Span(args.warmup, args.seconds))
    data: dict[str, Any] = {}
    ratios: dict[str, tuple[float, float]] = {}
    print("row       envs  cores  twin: /s  ratio    ready waited   real: /s                  ratio")
    for name, row in cases(scale).items():
        with_spares = [case for case in row if case.spares in (0, 2 * scale)]  # these in real time as well
        actual = dict(zip(with_spares, real(with_spares, span, repeats, args.seed), strict=True))
        found = {case: twin(case, virtual_span, args.seed) for case in row}
        for case in row:
            virtual = asdict(found[case]) | {"ratio": found[case].speed / found[row[0]].speed}
            data[f"{name}: {case.name}"] = {"case": asdict(case), "twin": virtual, "real": actual.get(case)}
            print(tell(name, case, virtual, actual.get(case)), flush=True)
            if case.spares == 2 * scale:
                ratios[name] = virtual["ratio"], actual[case]["ratio"]
    label = f"W4, 32 environments and {2 * scale} spares over none"
    checks = [
        at_least(f"{label}, in the twin", ratios["free"][0], BAR),
        at_least(f"{label}, in real time", ratios["free"][1], BAR),
    ]
    return finish("spares", args, checks, data)


def main() -> int:
    return command(answer, arguments())


if __name__ == "__main__":
    sys.exit(main())
