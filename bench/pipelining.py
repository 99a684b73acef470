"""What it is worth that one batched simulator steps while the actions of another are chosen.

Hypothesis: where a step takes as long as the choice of its actions, two batched simulators of M / 2 slots make 1.8
times as many decisions per second as one of M, or more, in virtual time, and 1.6 times or more in real time. With one,
simulation and generation wait for each other, and half of either is idle; with two they alternate, and all that is lost
is the first turn. Nothing is set but the number of simulators: requests of batched simulators do not wait to share a
batch.

That is so where times go with the number of slots. Where they do not (a simulator on a GPU that is not full, a policy
with a large fixed cost), two halves take as long as two wholes, and nothing is won by halves: rows ``fixed`` say so.
There, a second simulator of M slots gives the same factor instead, rows ``second``.

Simulator and policy take modelled time: they sleep in real time, and add it to the clock of the twin. A learner that
takes no time consumes what they do, with credit that does not limit it.

    python -m bench.pipelining --json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from bench.report import COUNT, Number, at_least, command, finish, parser, show, spread
from ebrl import Generator, PolicyOut, Runtime, TorchPolicy, Trainer, VectorGroup, env_spec, run, run_virtual
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine
from ebrl.core.records import Array, TrainBatch
from ebrl.core.virtual_machine import VirtualMachine, spend

PER_BATCH = 5  # decisions of each slot in a batch of the learner
LENGTH = 50  # steps of an episode, which all slots end together
TWIN_BAR, REAL_BAR = 1.8, 1.6


@dataclass(frozen=True)
class Row:
    """What is compared: one simulator of `slots`, and two.

    Attributes:
        name: Of the row.
        slots: M of the one.
        each: Of each of the two.
        fixed_s: Of a step, and of a choice of actions.
        per_slot_s: Likewise, for each slot.
    """

    name: str
    slots: int
    each: int
    fixed_s: float
    per_slot_s: float


def row(name: str, step_s: float, slots: int = 64) -> Row:
    """Return a row by name, in which a step of M slots takes `step_s`."""
    if name == "halves":
        return Row(name, slots, slots // 2, 0.0, step_s / slots)
    return Row(name, slots, slots if name == "second" else slots // 2, step_s, 0.0)


class SleepingVectorEnv(VectorEnv[Array, Array, Array]):
    """All slots show zeros, and end their episodes together."""

    def __init__(self, slots: int, step_s: float) -> None:
        self.num_envs = slots
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self._obs, self._no = np.zeros((slots, 1), np.float32), np.zeros(slots, np.bool_)
        self._step_s = step_s
        self._num_steps = 0

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._num_steps = 0
        return self._obs, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        spend(self._step_s)
        self._num_steps += 1
        return self._obs, np.zeros(self.num_envs), self._no, self._no | (self._num_steps >= LENGTH), {}


class SleepingPolicy(TorchPolicy):
    """Answers with zeros, and takes its time."""

    def __init__(self, case: Row) -> None:
        super().__init__(horizon=1, noise_dim=0)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.case = case

    def __deepcopy__(self, memo: dict[int, Any]) -> SleepingPolicy:
        return self  # nothing in it is ever trained

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        num = len(noise)
        spend(self.case.fixed_s + self.case.per_slot_s * num)
        zeros = torch.zeros(num, 1, 1)
        return PolicyOut(zeros, zeros, zeros[:, 0, 0], {})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("nothing is learned here")


class IdleLearner:
    """Learns nothing, in no time."""

    def __init__(self, policy: SleepingPolicy, batch_size: int) -> None:
        self.policy = policy
        self.batch_size = batch_size

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        return {}


async def rate(machine: Machine, case: Row, num_groups: int, rounds: int) -> float:
    """Return decisions per second, over some rounds of all slots after the first."""
    slots = case.slots if num_groups == 1 else case.each
    spec = env_spec(lambda: SleepingVectorEnv(slots, 0.0))  # to look at it takes no time
    step_s = case.fixed_s + case.per_slot_s * slots
    spec = replace(spec, make=lambda: SleepingVectorEnv(slots, step_s))
    policy = SleepingPolicy(case)
    clock = asyncio.get_running_loop().time
    async with Runtime(machine) as rt:
        gen = rt.start(Generator(policy, lanes=1))  # one device
        envs = rt.start(VectorGroup(spec, actor=gen, num_groups=num_groups))
        learner = IdleLearner(policy, PER_BATCH * slots * num_groups)
        trainer = rt.start(Trainer(envs, learner, updates=1 + rounds // PER_BATCH, max_lag=4))
        await anext(trainer)  # the first turns, in which they fall into step
        began_s, began = clock(), envs.admission.ledger().started
        async for _ in trainer:
            pass
        return (envs.admission.ledger().started - began) / (clock() - began_s)


def twin(case: Row, rounds: int) -> dict[str, float]:
    """Return decisions per second of one simulator and of two, in virtual time."""
    one, two = (run_virtual(rate(VirtualMachine({}), case, num, rounds)) for num in (1, 2))
    return {"one": one, "two": two, "ratio": two / one}


def real(case: Row, rounds: int, repetitions: int) -> dict[str, Any]:
    """Return the same in real time; medians of runs that take turns."""
    pairs = [[run(rate(LocalMachine(), case, num, rounds)) for num in (1, 2)] for _ in range(repetitions)]
    one, two = (spread([pair[i] for pair in pairs]) for i in range(2))
    return {"one": one, "two": two, "ratio": statistics.median([pair[1] / pair[0] for pair in pairs])}


MILLISECONDS = Number(float, 0.001, 60_000.0)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--step-ms", type=MILLISECONDS, default=40.0, help="of a step of all slots, and of a choice of actions"
    )
    made.add_argument("--rounds", type=COUNT, default=100, help="decisions of each slot")
    made.add_argument("--repetitions", type=COUNT, default=3, help="in real time")
    return made.parse_args()


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    step_s = 1e-3 * (2.0 if args.smoke else args.step_ms)
    rounds, repetitions = (5, 1) if args.smoke else (args.rounds, args.repetitions)
    data: dict[str, Any] = {}
    print("decisions per second      twin: one      two   ratio      real: one                   two   ratio")
    for name in ("halves", "second", "fixed"):
        case = row(name, step_s)
        virtual, actual = twin(case, rounds), real(case, rounds, repetitions)
        data[name] = {"twin": virtual, "real": actual}
        print(
            f"{name:22} {virtual['one']:12.0f} {virtual['two']:8.0f} {virtual['ratio']:7.2f}   {show(actual['one'])}   "
            f"{show(actual['two'])} {actual['ratio']:7.2f}"
        )
    halves = data["halves"]
    checks = [
        at_least("two simulators of half the slots over one, in the twin", halves["twin"]["ratio"], TWIN_BAR),
        at_least("two simulators of half the slots over one, in real time", halves["real"]["ratio"], REAL_BAR),
    ]
    return finish("pipelining", args, checks, data)


if __name__ == "__main__":
    sys.exit(main())
