"""`Stretch`: what was done between two readings, and how many decisions per second the machine allows by that."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ebrl.core.batching import Limit, Numbers
from ebrl.core.readings import GenReading, Reading, SimReading
from ebrl.core.sharing import Sharing
from ebrl.core.trial import enough

LEAST_REQUESTS = 32  # that say what a decision costs


@dataclass(frozen=True, slots=True)
class Stretch:
    """From one reading to another, with the same settings.

    Attributes:
        since: Where it begins.
        now: Where it ends.
    """

    since: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.now.now_s - self.since.now_s

    @property
    def judges(self) -> bool:
        """Whether enough was done to judge another setting by it."""
        return self.now.progress()[2] - self.since.progress()[2] >= enough(self.now)

    def simulated(self, sims: Iterable[SimReading]) -> float:
        """Return the seconds that calls of simulators took, over all lanes."""
        before = {sim.name: sim.busy_s for sim in self.since.sims}
        return sum(sim.busy_s - before.get(sim.name, 0.0) for sim in sims)

    def used(self) -> dict[str, float]:
        """Return core-seconds, by the stage that held them."""
        before = {core.kind: core.used for core in self.since.cores}
        return {core.kind: core.used - before.get(core.kind, 0.0) for core in self.now.cores}

    def served(self, gen: GenReading) -> tuple[int, int]:
        """Return requests and batches of a generator, which may have begun anew meanwhile."""
        for old in self.since.gens:
            if old.name == gen.name and old.num_requests <= gen.num_requests:
                return gen.num_requests - old.num_requests, gen.num_batches - old.num_batches
        return gen.num_requests, gen.num_batches

    def limit(self, gen: GenReading, shared: Sharing | None) -> Limit:
        """Return what simulators, cores and a shared device allow."""
        simulation, cores = self.simulation_limit(gen), self.core_limit(gen)

        def limit(batches: Numbers) -> Numbers:
            rates = np.full(len(batches), simulation)
            if cores is not None:
                rates = np.minimum(rates, cores(batches))
            if shared is not None:
                rates = np.minimum(rates, shared.limits(batches, self.now.gen_units))
            return rates

        return limit

    def most(self, gen: GenReading, shared: Sharing | None) -> float:
        """Return what they allow with batches as large as they were."""
        requests, batches = self.served(gen)
        return float(self.limit(gen, shared)(np.array([requests / max(batches, 1)]))[0])

    def simulation_limit(self, gen: GenReading) -> float:
        """Return decisions per second that the simulators could do, by what a decision has cost them."""
        sims = self.now.of(gen)
        requests, busy_s = self.served(gen)[0], self.simulated(sims)
        if requests < LEAST_REQUESTS or busy_s <= 0.0:
            return math.inf
        at_once = min(max(sim.num_cores for sim in sims), sum(sim.num_envs for sim in sims))  # groups share the cores
        return at_once * requests / busy_s

    def core_limit(self, gen: GenReading) -> Limit | None:
        """Return decisions per second for which the cores suffice, where generation needs them too; None: any number.

        Large batches need less of them. What a batch is expected to take includes waiting, so that it only says how
        the measured core-seconds change with the size.
        """
        used, (requests, batches) = self.used(), self.served(gen)
        if "gen" not in used or requests < LEAST_REQUESTS or gen.fixed_s + gen.per_request_s <= 0.0:
            return None
        gen_s, num_cores = used.pop("gen") / requests, self.now.num_cores
        others_s = sum(used.values()) / requests
        usual_s = gen.fixed_s * batches / requests + gen.per_request_s

        def limit(sizes: Numbers) -> Numbers:
            mine_s = gen_s * (gen.fixed_s / sizes + gen.per_request_s) / usual_s
            rates: Numbers = num_cores / np.maximum(others_s + mine_s, 1e-12)
            return rates

        return limit
