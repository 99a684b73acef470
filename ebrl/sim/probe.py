"""What a simulator takes: steps and resets under random actions, in the hosts of a run, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from ebrl.core.profile import StageProfile, StageRecord
from ebrl.core.records import EnvSpec, Place
from ebrl.core.runtime import Runtime
from ebrl.core.scope import finish
from ebrl.sim.placement import make_hosts
from ebrl.sim.players import Players, SimulationProbe

MAX_FIT = 512  # calls that the line of a step rests on
CLOSE_S = 5.0


async def probe_simulators(
    runtime: Runtime, spec: EnvSpec, count: int, *, seconds: float, host: Place, seed: int = 0
) -> SimulationProbe:
    """Let simulators run at once, each as fast as it can.

    Args:
        runtime: An open one, on a real machine, with nothing else in it.
        spec: From `ebrl.env_spec`.
        count: How many simulators, each with a thread or a process of its own.
        seconds: How long; every simulator does one reset and one step in any case.
        host: Where they run.
        seed: Of episodes and actions.

    Raises:
        ConfigError: The spec cannot be sent to a process.
        SimulatorError: A simulator broke its interface, or a call does not end.
    """
    specs = [spec] * count
    hosts = make_hosts(
        specs,
        host=host,
        lanes=count,
        machine=runtime.machine,
        pool=runtime.claim("sim"),
        name=f"probe-{count}",
        sample_every=1,
    )
    players = Players(specs, hosts, runtime.clock, seed)
    try:
        await players.open()
        return await players.play(seconds, anew=True)
    finally:
        await finish(players.aclose(CLOSE_S), "probe-close")


def records(probes: Sequence[SimulationProbe], group: str) -> tuple[StageRecord, ...]:
    """Return what a file keeps: latencies where most simulators ran at once, and steps as a line in their number.

    Args:
        probes: By number of simulators, smallest first.
        group: Name of the environments that the file will be used for.
    """
    crowd = probes[-1]
    step, reset = (_stage(name, group, times) for name, times in (("step", crowd.steps_s), ("reset", crowd.resets_s)))
    step.num, reset.num = crowd.num_steps, crowd.num_resets
    line = StageProfile("step", group, forgetting=1.0)
    parts = [[(probe.num_simulators, seconds) for seconds in _some(probe.steps_s)] for probe in probes]
    for calls in zip_longest(*parts):  # in turn: all of one kind after all of another would look like a change
        for call in calls:
            if call is not None:
                line.observe(*call)
    step.warm_start(StageRecord("step", group, line.record().fits))
    return step.record(), reset.record()


def _stage(name: str, group: str, times_s: list[float]) -> StageProfile:
    made = StageProfile(name, group, num_samples=max(1, len(times_s)))
    made.latency.extend(times_s)
    return made


def _some(times_s: list[float]) -> list[float]:
    return times_s[:: max(1, len(times_s) // MAX_FIT)]
