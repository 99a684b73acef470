"""Which simulators share which host, and what memory they take."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

from ebrl.core.errors import ConfigError
from ebrl.core.leases import Lease, Lender
from ebrl.core.protocols import Machine
from ebrl.core.records import EnvSpec, Place
from ebrl.core.runtime import Runtime
from ebrl.sim.hosts import SimHost, Slot, ThreadHost
from ebrl.sim.inline import InlineHost
from ebrl.sim.process import ProcessHost
from ebrl.sim.times import SAMPLE_EVERY

logger = logging.getLogger("ebrl")

MAX_THREADS = 256


def make_hosts(
    specs: Sequence[EnvSpec],
    *,
    host: Place,
    lanes: int | None,
    machine: Machine,
    pool: Lender | None,
    name: str,
    alone: bool = False,
    sample_every: int = SAMPLE_EVERY,
) -> list[SimHost]:
    """Make P hosts; simulator i is number ``i // P`` of host ``i % P``. Several specs share hosts.

    Args:
        specs: What to build, one simulator each.
        host: Kind of host.
        lanes: Threads of the one thread host, or number of processes; None: one thread each up to 256, or one
            process per core.
        machine: Makes the lanes.
        pool: Lends a core per working lane.
        name: Of the group.
        alone: With `lanes` None, processes are as threads: one each up to 256.
        sample_every: One in so many steps in threads is timed.

    Raises:
        ConfigError: A process host on a machine that exists as numbers only.
    """
    if host == "inline":
        return [InlineHost(specs, name)]
    if host == "thread":
        num = min(len(specs), lanes or MAX_THREADS)
        return [ThreadHost(specs, machine, pool, num, name=name, sample_every=sample_every)]
    if not machine.real:
        raise ConfigError("a virtual machine has no processes: use EnvGroup(host='thread') there")
    num = min(len(specs), lanes or (MAX_THREADS if alone else machine.num_cores))
    hosts: list[SimHost] = [ProcessHost(specs[i::num], machine, pool, f"{name}-process-{i}") for i in range(num)]
    for env, slot in enumerate(slots_of(hosts)):
        slot.env = env
    return hosts


def slots_of(hosts: Sequence[SimHost]) -> list[Slot]:
    """Return the simulators that `make_hosts` placed, in the order of their specs."""
    num, total = len(hosts), sum(len(host.slots) for host in hosts)
    return [hosts[i % num].slots[i // num] for i in range(total)]


async def take_memory(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Lease | None:
    """Take what the simulators will need, for good; waits for groups that are there already.

    Raises:
        ConfigError: There is less than that, whoever else is there.
    """
    wanted = sum(spec.memory_mib for spec in specs)
    if not wanted:
        return None
    pool = runtime.resources.pool("memory")
    if wanted > pool.units:
        sizes = " to ".join(map(str, sorted({min(s.memory_mib for s in specs), max(s.memory_mib for s in specs)})))
        raise ConfigError(
            f"{name}: {len(specs)} simulators of {sizes} MiB do not fit into {pool.units} MiB: use a smaller count"
        )
    return await pool.acquire(wanted, name)


def take_spare_memory(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> tuple[int, Lease | None]:
    """Take what simulators need that a group can do without, for as many of the first ones as there is room for now.

    Returns:
        How many those are, and their memory.
    """
    pool = runtime.resources.pool("memory")
    lease = None
    sums = [0, *accumulate(spec.memory_mib for spec in specs)]
    num = sum(total <= pool.free for total in sums[1:])
    if sums[num]:
        lease = take_now(pool, sums[num], name)
        num = num if lease is not None else 0
    if num < len(specs):
        logger.warning("%s: memory for %d of %d spare simulators", name, num, len(specs))
    return num, lease


def take_now(pool: Lender, units: int, who: str) -> Lease | None:
    """Take units that are free; None: they are not, or somebody waits whose turn it is before."""
    leases: list[Lease] = []
    ticket = pool.request(units, leases.append, who)
    if not leases:
        ticket.cancel()
    return leases[0] if leases else None
