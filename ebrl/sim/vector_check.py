"""`check_vector_env`: a conformance check for a batched simulator, to be run before a training run depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ebrl.core.errors import ConfigError, SimulatorError
from ebrl.core.records import Array, EnvSpec, Observation
from ebrl.core.rng import episode_seed
from ebrl.sim.check import MAX_STEPS, random_actions
from ebrl.sim.vector_simulator import VectorSimulator, rows

COMPARED = 20
"""Steps that are compared, at most."""
RESETS = 10
"""Of one slot, of which one at least shows something else than the step before: others may do so by chance."""


def check_vector_env(spec: EnvSpec, *, episodes: int = 2, seed: int = 0, tolerance: float = 0.0) -> None:
    """Play some episodes in every slot and look for what would go wrong in a run.

    Checked: that it says that it resets no slot by itself; shapes, dtypes and numbers of every step; that every episode
    ends; that a reset by mask begins an episode in its slots and changes nothing in the others; where slots have seeds
    of their own, that a seed gives the same episode in any slot, in another instance, and after the end of an episode.
    Not checked, since simulators may also end where they begin: that the last observation is that of the episode that
    has ended.

    Args:
        spec: From ``ebrl.env_spec(..., num_slots=M)``.
        episodes: How many to play in each slot.
        seed: From which their seeds and random actions are keyed.
        tolerance: By how much numbers may differ that should be equal; physics on a GPU is not exact.

    Raises:
        ConfigError: `episodes` below 1, or `spec` is no batched simulator, or one that resets slots by itself.
        SimulatorError: The first violation, in one line.
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")
    if not spec.num_slots:
        raise ConfigError(f"{spec.id} is no batched simulator: use check_env, or env_spec(..., num_slots=8)")
    check = _Check(spec, seed, tolerance)
    first = VectorSimulator(spec)
    try:
        plain = check.steps(first)
        second = VectorSimulator(spec)
        try:
            check.mask(plain, second)
            if spec.slot_seeds:
                check.seeds(first)
            check.episodes(first, episodes, second)
        finally:
            second.close()
    finally:
        first.close()


class _Check:
    def __init__(self, spec: EnvSpec, seed: int, tolerance: float) -> None:
        self.spec = spec
        self.num = spec.num_slots
        self.seed = seed
        self.tolerance = tolerance

    def first_seeds(self) -> dict[int, int]:
        return {slot: episode_seed(self.seed, slot, 0) for slot in range(self.num)}

    def actions(self) -> Iterator[Array]:
        """Yield random actions ``[M, 1, *shape]`` for ever."""
        for chunks in zip(*(random_actions(self.spec, self.seed + slot) for slot in range(self.num)), strict=True):
            yield np.stack(chunks)

    def steps(self, sim: VectorSimulator) -> list[Observation]:
        """Play until the first end of any episode; return what was seen."""
        seen = [sim.reset(self.first_seeds())[0]]
        for action, _ in zip(self.actions(), range(COMPARED), strict=False):
            result = sim.step(action)
            seen.append(result.obs)
            if (result.terminated | result.truncated).any():
                break
        return seen

    def mask(self, plain: list[Observation], sim: VectorSimulator) -> None:
        """Do the same in another instance, but reset slot 0 after its first step."""
        seeds, actions = self.first_seeds(), self.actions()
        self._same(plain[0], sim.reset(seeds)[0], "the first observation in another instance")
        self._same(plain[1], sim.step(next(actions)).obs, "the first step in another instance")
        if self.spec.slot_seeds:
            again = sim.reset({0: seeds[0]})[0]
            self._same(
                plain[0], again, "the observation after a reset by mask with the seed of its first reset", slots=[0]
            )
        else:
            self._moves(sim, *(rows(obs, self.num)[0] for obs in plain[:2]))
        for expected, action in zip(plain[2:], actions, strict=False):
            result = sim.step(action)
            self._same(
                expected,
                result.obs,
                "what a slot does after another one was reset by mask",
                slots=list(range(1, self.num)),
            )
            if result.terminated[0] or result.truncated[0]:
                break

    def seeds(self, sim: VectorSimulator) -> None:
        """Give all slots one seed and the same actions."""
        obs = sim.reset(dict.fromkeys(range(self.num), self.seed))[0]
        for action, _ in zip(random_actions(self.spec, self.seed), range(COMPARED), strict=False):
            seen = rows(obs, self.num)
            for slot in range(1, self.num):
                if not self._equal(seen[0], seen[slot]):
                    raise SimulatorError(
                        f"{self.spec.id}: slots 0 and {slot} had the same seed and actions and came to different "
                        f"observations: say metadata['slot_seeds'] = False if it cannot give each slot its own seed"
                    )
            result = sim.step(np.repeat(action[np.newaxis], self.num, 0))
            obs = result.obs
            if (result.terminated | result.truncated).any():
                return

    def episodes(self, sim: VectorSimulator, num: int, other: VectorSimulator) -> None:
        """Play until each slot has ended so many, resetting those that have, and another instance likewise."""
        sim.reset(self.first_seeds())
        ended, lengths = np.zeros(self.num, np.int64), np.zeros(self.num, np.int64)
        for action in self.actions():
            result = sim.step(action)
            lengths += [len(rewards) for rewards in result.rewards]
            over = result.terminated | result.truncated
            ended += over
            if (ended >= num).all():
                return
            if lengths.max() >= MAX_STEPS:
                raise SimulatorError(
                    f"{self.spec.id}: no end of slot {lengths.argmax()} after {MAX_STEPS} steps: give env_spec(..., "
                    "horizon=...)"
                )
            lengths[over] = 0
            seeds = {slot: episode_seed(self.seed, slot, int(ended[slot])) for slot in np.flatnonzero(over).tolist()}
            if not seeds:
                continue
            obs = sim.reset(seeds)[0]
            if self.spec.slot_seeds:
                what = "the observation after a reset by mask at the end of an episode, compared with another instance,"
                self._same(other.reset(seeds)[0], obs, what, slots=list(seeds))

    def _moves(self, sim: VectorSimulator, first: Observation, second: Observation) -> None:
        """Reset slot 0, which has seen `first` and, after a step, `second`; find out whether anything comes of it."""
        if self._equal(first, second):
            return  # whoever sees always the same sees it after a reset, too
        for number in range(RESETS):
            obs = sim.reset({0: episode_seed(self.seed, 0, number)})[0]
            if not self._equal(rows(obs, self.num)[0], second):
                return
        raise SimulatorError(f"{self.spec.id}: a reset by mask left its slot as it was: honour options['reset_mask']")

    def _same(self, expected: Observation, found: Observation, what: str, slots: list[int] | None = None) -> None:
        one, other = rows(expected, self.num), rows(found, self.num)
        for slot in range(self.num) if slots is None else slots:
            if not self._equal(one[slot], other[slot]):
                raise SimulatorError(f"{self.spec.id}: slot {slot}: {what} is not what it was")

    def _equal(self, one: Observation, other: Observation) -> bool:
        if isinstance(one, dict) and isinstance(other, dict):
            return all(self._equal(value, other[key]) for key, value in one.items())
        assert not isinstance(one, dict)
        assert not isinstance(other, dict)
        if not self.tolerance:
            return np.array_equal(one, other)
        return np.allclose(one, other, rtol=0.0, atol=self.tolerance)
