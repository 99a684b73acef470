"""What a policy takes: batches of several sizes on a generation lane, as a `Generator` would have them computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.profile import StageProfile, StageRecord
from ebrl.core.protocols import Lane, Request
from ebrl.core.records import ActionOut, Array, EnvSpec, Observation
from ebrl.core.rng import Domain, NoiseStream, stream
from ebrl.core.runtime import Runtime
from ebrl.gen.check import example_observations
from ebrl.gen.cpu import infer

WARM_UP_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 1, 5, 200  # of a batch of each size
MEDIAN_OF = 5


@dataclass(slots=True)
class PolicyProbe:
    """How long batches took, from their launch to their answer.

    Attributes:
        times_s: By number of rows, in order.
    """

    times_s: dict[int, list[float]] = field(default_factory=dict)

    @property
    def medians_s(self) -> dict[int, float]:
        """Usual time of a batch, by number of rows."""
        return {num: median(times_s) for num, times_s in self.times_s.items()}

    def record(self, group: str) -> StageRecord:
        """Return what a file keeps: the line through medians of a few batches each, in which stalls do not show.

        Args:
            group: Name of the generator that the file will be used for.
        """
        made = StageProfile("gen", group, forgetting=1.0)
        for first in range(0, min(map(len, self.times_s.values()), default=0), MEDIAN_OF):
            for num, times_s in self.times_s.items():  # sizes in turn: one after the other would look like a change
                some_s = times_s[first : first + MEDIAN_OF]
                made.observe(num, median(some_s))
                made.num += num * len(some_s)
        return made.record()


def sizes(max_batch: int) -> list[int]:
    """Return the numbers of rows to try: powers of two, and the largest."""
    return sorted({2**i for i in range(max_batch.bit_length())} | {max_batch})


async def probe_policy(
    runtime: Runtime,
    policy: torch.nn.Module,
    spec: EnvSpec,
    *,
    max_batch: int = 64,
    seconds: float,
    threads: int = 1,
    seed: int = 0,
) -> PolicyProbe:
    """Let a policy answer batches of made-up observations, one after the other.

    Args:
        runtime: An open one, with nothing else in it.
        policy: A `Policy`; only read.
        spec: Environment that it is for.
        max_batch: Most rows.
        seconds: How long; every size is tried a few times in any case.
        threads: Of torch, within the lane.
        seed: Of observations and noise.

    Raises:
        ConfigError: `max_batch` is below 1.
        PolicyError: The policy fails, or gives what is no number.
    """
    if max_batch < 1:
        raise ConfigError(f"max_batch must be at least 1, got {max_batch}")
    observations = example_observations(spec, max_batch, stream(seed, Domain.NOISE))
    rows = [_Row(obs, NoiseStream(seed, i)) for i, obs in enumerate(observations)]
    lane = runtime.machine.lane("gen", "probe-gen", runtime.claim("gen"), threads)
    if runtime.machine.real:
        await lane.run(torch.set_num_threads, threads, n=0)
    clock = runtime.clock
    found = PolicyProbe({num: [] for num in sizes(max_batch)})
    until_s = clock() + seconds
    for number in range(WARM_UP_ROUNDS + MAX_ROUNDS):
        if number >= WARM_UP_ROUNDS + MIN_ROUNDS and clock() >= until_s:
            break
        for num, times_s in found.times_s.items():
            began_s = clock()
            await _answer(lane, policy, rows[:num])
            if number >= WARM_UP_ROUNDS:
                times_s.append(clock() - began_s)
    return found


async def _answer(lane: Lane, policy: torch.nn.Module, rows: Sequence[Request]) -> None:
    for answer in await lane.run(infer, policy, rows, 0, False, None, n=len(rows)):
        if isinstance(answer, PolicyError):
            raise answer


class _Row:
    """A request that nobody made."""

    def __init__(self, obs: Observation, noise: NoiseStream) -> None:
        self.obs = obs
        self.noise = noise
        self.index = 0
        self.memory: Array | None = None
        self.answered_s = 0.0

    def cancelled(self) -> bool:
        return False

    def deliver(self, out: ActionOut) -> None:
        """Nobody waits."""

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""

    def where(self) -> str:
        return "a made-up observation"
