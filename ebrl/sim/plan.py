"""`Plan`: which episode comes next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ebrl.core.errors import Closed, ConfigError, whole
from ebrl.core.records import Episode
from ebrl.core.rng import episode_seed

MAX_SEED = 2**63


class Plan:
    """Endless keyed seeds for training, or a list of seeds that is run to its end, by every task.

    Until somebody asks for either, environments wait.
    """

    def __init__(self, task_of: Sequence[int], group_size: int = 1) -> None:
        """Make a plan.

        Args:
            task_of: Number of the task of each environment.
            group_size: Consecutive environments that train with the same seeds.
        """
        self._task_of = task_of
        self._group_size = group_size
        self._train_seed: int | None = None
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in set(task_of)]
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._results: dict[int, Episode] = {}
        self._positions = range(0)  # of the running evaluation; those of a cancelled one never come again
        self._done: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Environments that have no episode to run."""
        return sum(not future.done() for _, future in self._waiters)

    def must_wait(self, env: int) -> bool:
        """Whether `next` has nothing to give until somebody asks for episodes."""
        return self._train_seed is None and not self._queues[self._task_of[env]]

    def refuse_training(self, name: str) -> None:
        """Check that nobody has used the group `name` before.

        Raises:
            ConfigError: Somebody has: decisions of two consumers would be mixed.
        """
        if self._train_seed is not None:
            raise ConfigError(f"{name} has a trainer already: give every trainer a group of its own")
        if self._positions.stop:
            raise ConfigError(f"{name} has run an evaluation: train with a group of its own")

    def train(self, seed: int) -> None:
        """Run for ever."""
        self._train_seed = seed
        self._release()

    async def run(self, seeds: Sequence[int]) -> list[Episode]:
        """Run these, every task all of them, and wait for the last.

        Returns:
            By seed, then by task.
        """
        if self._train_seed is not None:
            raise ConfigError("this EnvGroup is used for training: evaluate with a group of its own")
        if self._done is not None:
            raise ConfigError("an evaluation is running on this EnvGroup: await it before the next")
        seeds = [whole("a seed of an episode", seed, 0, MAX_SEED - 1) for seed in seeds]
        if not seeds:
            return []
        self._results = {}
        num_tasks = len(self._queues)
        self._positions = range(self._positions.stop, self._positions.stop + len(seeds) * num_tasks)
        for task, queue in enumerate(self._queues):
            queue.extend(zip(self._positions[task::num_tasks], seeds, strict=True))
        self._done = asyncio.get_running_loop().create_future()
        self._release()
        try:
            await self._done
        finally:
            self._done = None
            for queue in self._queues:
                queue.clear()
            self._positions = range(self._positions.stop, self._positions.stop)
        return [
            replace(self._results[position], episode=i // num_tasks) for i, position in enumerate(sorted(self._results))
        ]

    def close(self, why: str) -> None:
        """No episode will end any more: say so to whoever waits for them."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(Closed(why))

    async def wait(self, env: int) -> None:
        """Wait until somebody asks for episodes; another environment may have taken the last one by then."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((env, future))
        await future

    def next(self, env: int, episode: int) -> tuple[int, int]:
        """Return position and seed of the next episode of `env`."""
        if self._train_seed is not None:
            return episode, episode_seed(self._train_seed, env // self._group_size, episode)
        return self._queues[self._task_of[env]].popleft()

    def ahead(self, env: int, episode: int) -> tuple[int, int] | None:
        """Return what `next` will return, where that is known beforehand: in training."""
        return None if self._train_seed is None else self.next(env, episode)

    def give_back(self, env: int, episode: tuple[int, int]) -> None:
        """An episode that `next` gave to `env` came to nothing: of a list somebody runs it again, of others nobody."""
        if self._train_seed is None and episode[0] in self._positions:
            self._queues[self._task_of[env]].appendleft(episode)
            self._release()

    def wants(self, position: int) -> bool:
        """Whether an episode that was given out is still to be run."""
        return self._train_seed is not None or position in self._positions

    def finished(self, episode: Episode) -> bool:
        """Take a result; return whether it belongs to an evaluation."""
        if self._train_seed is not None:
            return False
        if episode.episode in self._positions:
            self._results[episode.episode] = episode
            if self._done is not None and len(self._results) == len(self._positions) and not self._done.done():
                self._done.set_result(None)
        return True

    def _release(self) -> None:
        """Wake those who have something to run, and no more of them than there is."""
        left = [len(queue) for queue in self._queues]
        waiters, self._waiters = self._waiters, deque()
        for env, future in waiters:
            task = self._task_of[env]
            if future.done():
                continue
            if self._train_seed is not None or left[task]:
                left[task] -= 1
                future.set_result(None)
            else:
                self._waiters.append((env, future))
