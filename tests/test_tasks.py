"""Several tasks in one group: who runs which, what must agree, and what is said of each."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError
from ebrl.core.leases import Lender
from ebrl.core.machine import LocalMachine
from ebrl.core.records import ArraySpec, EnvSpec, Episode, UpdateReport
from ebrl.core.runtime import Runtime
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualLane, VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.sim.process import ProcessHost
from ebrl.sim.tasks import as_specs, common_host, spread
from ebrl.train.evaluate import EvalReport, evaluate
from ebrl.train.metrics import flatten
from tests.helpers import PATIENT, leaves, scripted_spec, training, virtually

SHORT = scripted_spec(length=3, task="short", success_above=-9.0)
LONG = scripted_spec(length=8, task="long", success_above=9.0)


class Slow(VirtualMachine):
    """The lanes of every other environment have a law of their own."""

    def lane(self, kind: str, name: str, pool: Lender | None = None, units: int = 1) -> VirtualLane:
        slow = name.startswith("envs-") and int(name.removeprefix("envs-")) % 2
        return super().lane("slow" if slow else kind, name, pool, units)


def slow_machine(slow_s: float = 4.0, seed: int = 0) -> VirtualMachine:
    laws = {"sim": lambda n, rng: 1.0, "slow": lambda n, rng: slow_s * (0.5 + rng.random())}
    return Slow(laws, servers={"slow": 64}, seed=seed)


# What must agree.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"observation": ArraySpec((4,), "float32")},
            r"observation: float32 of shape \(3,\) and float32 of shape \(4,\)",
        ),
        ({"observation": ArraySpec((3,), "uint8")}, r"observation: float32 of shape \(3,\) and uint8.*"),
        ({"observation": {"a": ArraySpec((3,), "float32")}}, "observation: one array and a dictionary of a"),
        ({"action": ArraySpec((), "int64", num_values=3)}, r"action: float32 of shape \(2,\) and int64 .*, 3 values"),
        ({"action": replace(LONG.action, high=np.full(2, 2.0))}, r"action.high: \[1. 1.\] and \[2. 2.\]"),
        ({"action": replace(LONG.action, low=None)}, r"action.low: \[-1. -1.\] and None"),
    ],
)
def test_specs_that_one_policy_cannot_serve_are_named_with_their_difference(
    change: dict[str, Any], message: str
) -> None:
    other = replace(LONG, id="other", **change)
    with pytest.raises(ConfigError, match=rf"specs 0 \(scripted\) and 2 \(other\) differ in {message}: one policy"):
        as_specs([SHORT, LONG, other])


def test_parts_of_a_dictionary_are_compared_by_name() -> None:
    parts = {"a": ArraySpec((3,), "float32"), "b": ArraySpec((2,), "float32")}
    one = replace(SHORT, observation=parts)
    assert as_specs([one, replace(LONG, observation=dict(reversed(parts.items())))])
    with pytest.raises(ConfigError, match=r"observation\['b'\]: float32 of shape \(2,\) and float32 of shape \(5,\)"):
        as_specs([one, replace(LONG, observation={**parts, "b": ArraySpec((5,), "float32")})])


def test_bounds_of_observations_need_not_agree() -> None:
    assert as_specs([SHORT, replace(LONG, observation=ArraySpec((3,), "float32", np.zeros(3), np.ones(3)))])


def test_tasks_need_names_and_there_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"spec 1 \(scripted\) has no task"):
        as_specs([SHORT, scripted_spec()])
    with pytest.raises(ConfigError, match="no EnvSpec was given"):
        as_specs([])
    assert len(as_specs([scripted_spec()])) == 1, "one needs no name"


def test_hosts_must_agree_unless_one_is_chosen() -> None:
    other = replace(LONG, host="process")
    assert common_host([SHORT, LONG]) == "thread"
    with pytest.raises(ConfigError, match='wants host="thread", scripted host="process": give one to the group'):
        common_host([SHORT, other])
    actor = Generator(ScriptedPolicy(SHORT))
    with pytest.raises(ConfigError, match="wants host="):
        EnvGroup([SHORT, other], actor=actor, count=2)
    assert EnvGroup([SHORT, other], actor=actor, count=2, host="thread").tasks == ["short", "long"]


@given(num=st.integers(1, 5), size=st.integers(1, 4), groups=st.integers(1, 12))
def test_specs_are_dealt_in_turn_to_whole_groups(num: int, size: int, groups: int) -> None:
    specs = [replace(SHORT, task=str(i)) for i in range(num)]
    if groups < num:
        with pytest.raises(ConfigError, match=f"leaves some of {num} specs .* at least {num * size}"):
            spread(specs, groups * size, size)
        return
    dealt = spread(specs, groups * size, size)
    assert dealt == [group % num for group in range(groups) for _ in range(size)]


def test_groups_come_out_even() -> None:
    with pytest.raises(ConfigError, match="count=7 is no multiple of group_size=2"):
        spread([SHORT], 7, 2)


# Who runs which.


@virtually
async def test_environment_i_has_spec_i_in_turn() -> None:
    async with training([SHORT, LONG], slow_machine(), count=5, batch_size=10, updates=12) as stage:
        assert stage.envs.tasks == ["short", "long", "short", "long", "short"]
        episodes = [episode async for report in stage.trainer for episode in report.episodes]
    lengths = {"short": 3, "long": 8}
    assert {episode.task for episode in episodes} == set(lengths)
    for episode in episodes:
        assert (episode.task, episode.num_steps) == (stage.envs.tasks[episode.env], lengths[episode.task])
    for batch in stage.learner.batches:
        for segment in batch.segments:
            assert segment.task == stage.envs.tasks[segment.env]


@virtually
async def test_memory_is_taken_for_each_environment() -> None:
    specs = [replace(SHORT, memory_mib=100), replace(LONG, memory_mib=300)]
    async with Runtime(VirtualMachine({}, memory_mib=1000)) as rt:
        envs = rt.start(EnvGroup(specs, actor=rt.start(Generator(ScriptedPolicy(SHORT))), count=3))
        await envs.run_episodes([1])
        assert rt.resources.pool("memory").statistics().holding == {"envs": 500}
    with pytest.raises(ExceptionGroup) as caught:
        async with Runtime(VirtualMachine({}, memory_mib=1000)) as rt:
            rt.start(EnvGroup(specs, actor=rt.start(Generator(ScriptedPolicy(SHORT))), count=6))
            await settle()
    (error,) = leaves(caught.value)
    assert str(error) == "envs: 6 simulators of 100 to 300 MiB do not fit into 1000 MiB: use a smaller count"


def keyed(extra: str, action_repeat: int, **options: Any) -> EnvSpec:
    make = functools.partial(ScriptedEnv, obs_dim=3, action_dim=2, **options)
    form = ArraySpec((3,), "float32"), ArraySpec((2,), "float32")
    return EnvSpec("scripted", make, *form, None, action_repeat, extra, info_keys=("success", *extra.split()))


def test_one_process_hosts_several_specs() -> None:
    """They differ in what they report and in how often they repeat an action: rows have room for each."""
    specs = [keyed("", 1, length=4), keyed("x", 5, length=4), keyed("y x", 2, length=9)]

    async def main() -> None:
        machine = LocalMachine()
        host = ProcessHost(specs, machine, None, "host")
        loop = asyncio.get_running_loop()
        found = []
        try:
            await host.open()
            for slot in host.slots:
                started: asyncio.Future[Any] = loop.create_future()
                slot.reset(started, 5)
                await started
                stepped: asyncio.Future[Any] = loop.create_future()
                slot.step(stepped, np.ones((2, 2), np.float32))
                found.append(await stepped)
        finally:
            assert await host.aclose(10.0) == []
            await machine.aclose(deadline_s=1.0)
        assert [(one.num_steps, one.truncated) for one in found] == [(2, False), (4, True), (4, False)]
        assert [sorted(one.info) for one in found] == [["success", "x"], ["success", "x"], ["success", "x"]]

    asyncio.run(main())


def test_processes_have_the_specs_of_their_environments() -> None:
    async def main() -> list[tuple[str, int]]:
        async with Runtime(LocalMachine(2)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SHORT)))
            envs = rt.start(EnvGroup([SHORT, LONG], actor=gen, count=4, host="process", lanes=2))
            return [(episode.task, episode.num_steps) for episode in await envs.run_episodes(range(8))]

    assert asyncio.run(main()) == [("short", 3), ("long", 8)] * 8


# Evaluation: every task runs every seed.


async def evaluated(count: int, machine: Callable[[], VirtualMachine], seeds: Sequence[int]) -> tuple[Episode, ...]:
    async with Runtime(machine()) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SHORT), deterministic=True))
        specs = [SHORT, LONG, replace(SHORT, task="again")]
        envs = rt.start(EnvGroup(specs, actor=gen, count=count, failures=PATIENT))
        return (await evaluate(envs, seeds)).episodes


def test_every_task_runs_every_seed_whoever_is_fast() -> None:
    seeds = [4, 4, 1, 9, 0]
    rows = []
    for count, machine in (
        (3, slow_machine),
        (7, slow_machine),
        (30, lambda: slow_machine(50.0, 1)),
        (4, lambda: VirtualMachine({})),
    ):
        episodes = run_virtual(evaluated(count, machine, seeds))
        assert [(e.seed, e.task) for e in episodes] == [(s, task) for s in seeds for task in ("short", "long", "again")]
        assert [e.episode for e in episodes] == [i for i in range(5) for _ in range(3)]
        rows.append([(e.total_reward, e.num_steps, e.success) for e in episodes])
    assert all(row == rows[0] for row in rows)
    assert rows[0][0] == rows[0][2], "the same start, and the same length"
    assert rows[0][0] != rows[0][1]


@virtually
async def test_evaluations_of_several_tasks_may_follow_each_other_and_be_cancelled() -> None:
    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SHORT), deterministic=True))
        envs = rt.start(EnvGroup([SHORT, LONG], actor=gen, count=4))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.5):
                await evaluate(envs, range(10))
        for seeds in ([7, 8], [3], []):
            episodes = await envs.run_episodes(seeds)
            assert [(e.seed, e.task) for e in episodes] == [
                (seed, task) for seed in seeds for task in ("short", "long")
            ]


# What is said of each.


def episode(task: str, success: bool | None, total_reward: float = 1.0) -> Episode:
    return Episode(0, 0, 0, total_reward, 1, 1, success, 1.0, 0, task)


def test_an_evaluation_says_how_every_task_went() -> None:
    report = EvalReport((episode("b", True, 3.0), episode("a", None), episode("b", False), episode("b", True)))
    assert report.task_success_rates == pytest.approx({"b": 2 / 3, "a": math.nan}, nan_ok=True)
    assert report.task_returns == pytest.approx({"b": 5 / 3, "a": 1.0})
    assert report.success_rate == pytest.approx(2 / 3)
    assert report.mean_return == 1.5


@virtually
async def test_reports_and_metrics_name_tasks_where_there_are_several() -> None:
    async with training([SHORT, LONG], slow_machine(), count=4, batch_size=12, updates=6) as stage:
        reports = [report async for report in stage.trainer]
    assert all(report.tasks == ("short", "long") for report in reports)
    lines = [flatten(report) for report in reports]
    names = {f"rollout/{what}/{task}" for what in ("return", "success_rate") for task in ("short", "long")}
    assert all(names <= line.keys() for line in lines), "the same columns, whoever has ended an episode"
    assert math.isnan(lines[0]["rollout/success_rate/long"]), "none has ended in the first report"
    assert {(line["rollout/success_rate/short"], line["rollout/success_rate/long"]) for line in lines[-1:]} == {
        (1.0, 0.0)
    }
    async with training(SHORT, count=4, batch_size=12, updates=1) as stage:
        (report,) = [report async for report in stage.trainer]
    assert (report.tasks, [name for name in flatten(report) if "rollout/return/" in name]) == (("short",), [])


def report(*episodes: Episode) -> UpdateReport:
    return UpdateReport(3, 64, 12_345, 6.78, 0.5, 0.25, 0.98, 1, (1, 63), {}, episodes, {})


def test_a_report_is_one_line() -> None:
    ends = "lag 0.98 (max 1), 12,345 env steps in 6.8 s; waited 0.50 s, updated 0.25 s"
    assert report().describe() == f"update 3: no episode has ended, {ends}"
    assert (
        report(episode("", None), episode("", None, 2.0)).describe() == f"update 3: return 1.50 of 2 episodes, {ends}"
    )
    known = report(episode("", True), episode("", False, 2.0)).describe()
    assert known == f"update 3: return 1.50 of 2 episodes, success 50%, {ends}"


def test_the_mean_return_does_not_depend_on_who_ended_first() -> None:
    episodes = [episode("", None, x) for x in (1e16, 1.0, -1e16, 0.1, 0.2, 0.3)]
    assert {report(*order).mean_return for order in itertools.permutations(episodes)} == {1.6 / 6}
