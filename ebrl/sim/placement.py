"""Which simulators share which host."""

from __future__ import annotations

from collections.abc import Sequence

from ebrl.core.errors import ConfigError
from ebrl.core.leases import Lender
from ebrl.core.protocols import Machine
from ebrl.core.records import EnvSpec, Place
from ebrl.sim.hosts import SimHost, ThreadHost
from ebrl.sim.inline import InlineHost
from ebrl.sim.process import ProcessHost
from ebrl.sim.times import SAMPLE_EVERY

MAX_THREADS = 256


def make_hosts(
    specs: Sequence[EnvSpec],
    *,
    host: Place,
    lanes: int | None,
    machine: Machine,
    pool: Lender | None,
    name: str,
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
    num = min(len(specs), lanes or machine.num_cores)
    hosts: list[SimHost] = [ProcessHost(specs[i::num], machine, pool, f"{name}-process-{i}") for i in range(num)]
    for env in range(len(specs)):
        hosts[env % num].slots[env // num].env = env
    return hosts
