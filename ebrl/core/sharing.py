"""How fast generation and training can be together on one device, whole or divided.

Alone, a decision needs `gen_s` of it to be made and `train_s` to be learned from. While both run, they make progress at
speeds g and t: half each where they take turns, or what a share of the units is good for where these are divided (the
units of an idle side are lent). Both must do X decisions per second; the side with less to do is alone for no time, so

    1 / X = max(gen_s + train_s (1 - g) / t, train_s + gen_s (1 - t) / g)

With g + t = 1 that is the sum. Speeds of shares that were not tried are a guess: u (1 + k) / (u + k) for the part u of
the units, k = 2 for generation, which saturates early, and 10 for training, whose matrix products scale nearly with
the units. They only rank divisions; what a division is worth is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebrl.core.readings import Reading

GEN_LINEARITY, TRAIN_LINEARITY = 2.0, 10.0
PARTS = 8  # a device is divided in eighths


def gen_units(sm_units: int) -> list[int]:
    """Return the divisions worth a look, as units for generation; 0: undivided."""
    return sorted({0, *(round(sm_units * part / PARTS) for part in range(1, PARTS))} - {sm_units})


def speeds(units: int, sm_units: int) -> tuple[float, float]:
    """Return the speeds of generation and training while both run, of what each has alone."""
    if not units:
        return 0.5, 0.5
    part = units / sm_units
    return _speed(part, GEN_LINEARITY), _speed(1 - part, TRAIN_LINEARITY)


def shared_limit(gen_s: NDArray[np.float64] | float, train_s: float, units: int, sm_units: int) -> NDArray[np.float64]:
    """Return decisions per second of both together; see the module."""
    gen, train = speeds(units, sm_units)
    first = np.asarray(gen_s) + train_s * (1 - gen) / train
    second = train_s + np.asarray(gen_s) * (1 - train) / gen
    limit: NDArray[np.float64] = 1.0 / np.maximum(np.maximum(first, second), 1e-12)
    return limit


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the two sides need of their device.

    Attributes:
        fixed_s: Of a batch of generation, alone on the device.
        per_request_s: Of each request in it.
        train_s: Of a decision in an update, alone.
        gen_slowdown: How many times longer batches take now than alone.
        sm_units: Of the device.
    """

    fixed_s: float
    per_request_s: float
    train_s: float
    gen_slowdown: float
    sm_units: int

    def gen_s(self, batch: float) -> float:
        """Return the time of one decision in a batch of that size, alone."""
        return self.fixed_s / batch + self.per_request_s

    def limit(self, batch: float, units: int) -> float:
        """Return decisions per second with batches of that size."""
        return float(shared_limit(self.gen_s(batch), self.train_s, units, self.sm_units))

    def limits(self, batches: Sequence[float] | NDArray[np.float64], units: int) -> NDArray[np.float64]:
        """Return them for several sizes."""
        gen_s = self.fixed_s / np.asarray(batches, np.float64) + self.per_request_s
        return shared_limit(gen_s, self.train_s, units, self.sm_units)


def sharing(before: Reading, last: Reading, gen_name: str, train_name: str) -> Sharing | None:
    """Return what the time between two updates says; None where there was none.

    How long each side had the device to itself is not observed: it is taken as if they met by chance.
    """
    old, new = (next((t for t in r.trains if t.name == train_name), None) for r in (before, last))
    gen_old, gen = (next((g for g in r.gens if g.name == gen_name), None) for r in (before, last))
    if old is None or new is None or gen_old is None or gen is None or new.num_updates == old.num_updates:
        return None
    period_s = max(new.updated_s - old.updated_s, 1e-9)
    training = min(1.0, new.update_s * (new.num_updates - old.num_updates) / period_s)
    generating = min(1.0, (gen.busy_s - gen_old.busy_s) / max(last.now_s - before.now_s, 1e-9))
    gen_speed, train_speed = speeds(last.gen_units, last.sm_units)
    slowdown = training / gen_speed + 1 - training
    batch_size = (new.num_decisions - old.num_decisions) / (new.num_updates - old.num_updates)
    return Sharing(
        fixed_s=gen.fixed_s / slowdown,
        per_request_s=gen.per_request_s / slowdown,
        train_s=new.update_s * (1 - generating + generating * train_speed) / max(batch_size, 1),
        gen_slowdown=slowdown,
        sm_units=last.sm_units,
    )


def _speed(part: float, linearity: float) -> float:
    return part * (1 + linearity) / (part + linearity)
