"""`Account`: what a claim on a pool has earned and used, as two numbers, since one cannot do both jobs.

- The *level*, in unit-seconds, says whether the claim is entitled (above 0). It fills with the rate, up to the burst;
  what is held drains it, and the predicted rest of every lease is taken when it is granted. So in the long run it is
  the integral of rate minus use, whatever was predicted. What is borrowed while nobody entitled wants the units leaves
  a debt of one burst at most: nobody is starved for having used what was idle.
- The *turn*, in seconds of the claim's own rate, says who was served least: use divided by rate, predictions
  included, as in start-time fair queueing (Goyal et al. 1996). Levels cannot say that: they are clipped, so claims that
  all borrow, or are all owed, would tie, and shares would follow the order of arrival and not the rates. Who comes to
  wait starts where the service has come: turns compare what is used while others wait, not history.

Both are counted from what is held from moment to moment; a wrong prediction is forgotten when its lease ends. A
*contest* lasts as long as somebody waits whom a free unit would serve.
"""

from __future__ import annotations

from ebrl.core.errors import amount

FEW = 4  # leases per unit that a claim at its ceiling may be behind: it is behind by some just because use is lumpy


class Front:
    """How far the service of claims that stand side by side has come: the largest turn at which one was served."""

    __slots__ = ("turn_s",)

    def __init__(self) -> None:
        self.turn_s = 0.0


class Account:
    """The numbers of one claim; those of its children are in it.

    Attributes:
        name: Of the claim.
        rate: Units that it is entitled to.
        ceiling: Most units that it may hold.
        widest: Most units that one request has asked: the ceiling stays at or above it.
        held: Units.
        num_waiting: Queues that wait.
        used: Unit-seconds, until the last `accrue`.
        inner: Front of its children.
    """

    __slots__ = (
        "_base",
        "_burst_s",
        "_cap",
        "_ends",
        "_front",
        "_level",
        "_then_s",
        "ceiling",
        "held",
        "inner",
        "name",
        "num_waiting",
        "rate",
        "used",
        "widest",
    )

    def __init__(self, name: str, front: Front, rate: float, burst_s: float, ceiling: int) -> None:
        """Open an account, with a full level; see `ebrl.core.tokens.TokenBucket`.

        Raises:
            ConfigError: `burst_s` out of range.
        """
        self.name = name
        self.ceiling = ceiling
        self.widest = 0
        self.held = 0
        self.num_waiting = 0
        self.used = 0.0
        self.inner = Front()
        self._front = front
        self._burst_s = amount(f"burst_s of bucket {name!r}", burst_s)
        self._then_s = 0.0  # a full level earns nothing: the clock need not be known yet
        self._ends = 0.0  # sum of units * expected end over the leases: what is to come of them is then one product
        self._base = 0.0  # use at which the turn was 0
        self.rate = self._cap = self._level = 1.0
        self.change_rate(rate, 0.0)
        self._level = self._cap

    def change_rate(self, rate: float, now_s: float) -> None:
        """Earn at another rate from now on.

        Raises:
            ConfigError: It is not above 0 and finite.
        """
        rate = amount(f"rate of bucket {self.name!r}", rate)
        self.accrue(now_s)
        self._base = self.used - (self.used - self._base) / self.rate * rate  # the turn stays
        self.rate = rate
        self._cap = rate * self._burst_s

    def accrue(self, now_s: float) -> None:
        """Count what was earned and used until now."""
        passed_s = now_s - self._then_s
        if passed_s > 0:
            self._then_s = now_s
            used = self.held * passed_s
            self.used += used
            level = self._level + self.rate * passed_s - used
            if level > self._cap:  # what is to come of leases is taken already: it may be earned meanwhile
                level = min(level, self._cap + self._to_come(now_s))
            self._level = level

    def take(self, units: int, until_s: float, now_s: float) -> bool:
        """Hold units more; what they cost until `until_s` is taken from the level.

        Returns:
            Whether the claim was entitled, before.
        """
        self.accrue(now_s)
        held, ends, level = self.held, self._ends, self._level
        self.held = held + units
        self._ends = ends + units * until_s
        return level > 0 and level > ends - held * now_s

    def give_back(self, units: int, until_s: float, now_s: float) -> None:
        """Hold units less; what was taken beyond the use is put back."""
        self.accrue(now_s)
        self.held = held = self.held - units
        self._ends = self._ends - units * until_s if held else 0.0  # no rounding error lives on

    def level(self, now_s: float) -> float:
        """Unit-seconds that are left, in view of what the leases are still expected to cost."""
        self.accrue(now_s)
        return self._level - self._to_come(now_s)

    def turn_s(self, now_s: float) -> float:
        """Seconds of its rate that it has used, or will have used when its leases end."""
        self.accrue(now_s)
        return (self.used - self._base + self._to_come(now_s)) / self.rate

    def start_waiting(self, now_s: float) -> None:
        """Join those that wait, with no claim on what they were given before."""
        if not self.num_waiting:
            self._join(self._front.turn_s, now_s)
        self.num_waiting += 1

    def stand_aside(self, hold_s: float, now_s: float) -> None:
        """A ceiling holds it up: that makes no claim on what others are given meanwhile, beyond a few leases."""
        late_s = self._burst_s + FEW * self.ceiling * hold_s / self.rate
        self._join(self._front.turn_s - late_s, now_s)

    def advance(self, now_s: float) -> None:
        """It is served while others wait: this is where the service has come."""
        self._front.turn_s = max(self._front.turn_s, self.turn_s(now_s))

    def start_counting(self, now_s: float) -> None:
        """A contest begins: what was used until now is held against nobody."""
        self.accrue(now_s)
        self.forgive()
        self._front.turn_s = max(self._front.turn_s, (self.used - self._base) / self.rate)

    def excuse(self, used: float) -> None:
        """Do not count `used` unit-seconds, of a lease that was granted before the contest began."""
        self._base += used
        self.forgive()

    def forgive(self) -> None:
        """Forget what it owes beyond one burst: nobody entitled wanted the units."""
        self._level = max(self._level, -self._cap)

    def _join(self, turn_s: float, now_s: float) -> None:
        late_s = turn_s - self.turn_s(now_s)
        if late_s > 0:
            self._base -= late_s * self.rate

    def _to_come(self, now_s: float) -> float:
        to_come = self._ends - self.held * now_s
        return to_come if to_come > 0 else 0.0
