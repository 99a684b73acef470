"""The schedulers that EBRL is compared with: exact in virtual time where that can be said by hand, and clean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bench.baselines import FAMILIES, async_train, lockstep, parse, settings, size_timeout, ver, wait_num
from bench.baselines.parts import Learner, Request, Requests, answer, share
from bench.hardware import Hardware, Tally
from bench.loading import load_pair, load_w
from bench.workload import MachineProfile, PolicyProfile, SimulatorProfile, TrainingProfile, Workload
from ebrl.core.errors import ConfigError
from ebrl.core.virtual import run_virtual

NUM, HORIZON, CHUNK, STEP_S, GEN_S, RESET_S, UPDATE_S = 8, 20, 4, 0.01, 0.03, 0.5, 2.0
Run = Callable[[Hardware], Coroutine[Any, Any, None]]


def make(*, trained: bool = True, cores: int = NUM, sim: dict[str, Any] | None = None, **policy: Any) -> Workload:
    """Return `NUM` environments that take the same time whenever they step; episodes of `HORIZON` steps."""
    simulator: dict[str, Any] = {
        "kind": "cpu", "num_envs": NUM, "slots_per_unit": 1, "cores_per_unit": 1, "step_s": STEP_S, "slot_s": 0.0,
        "step_cv": 0.0, "burst_share": 0.0, "burst_factor": 1.0, "burst_steps": 1.0, "stall_probability": 0.0,
        "stall_factor": 1.0, "reset_s": RESET_S, "reset_cv": 0.0, "episode_law": "uniform",
        "shortest_episode": HORIZON, "horizon": HORIZON, "success_rate": 0.0, "sm_share": 0.0, "bandwidth": 0.0,
    }  # fmt: skip
    speeds = ("core_speed", "generation_speed", "training_speed", "simulation_speed", "memory_bandwidth")
    base = {"chunk": CHUNK, "fixed_s": GEN_S, "per_sample_s": 0.0, "linearity": 1.0, "bandwidth": 0.0}
    return Workload(
        name="test",
        simulator=SimulatorProfile(**simulator | (sim or {})),
        policy=PolicyProfile(**base | policy),
        training=TrainingProfile(
            samples_per_s=NUM * HORIZON / CHUNK / UPDATE_S, epochs=1, rollout_epochs=1, linearity=1.0, bandwidth=0.0
        )
        if trained
        else None,
        machine=MachineProfile(num_cores=cores, sm_units=16, **dict.fromkeys(speeds, 1.0)),
        sources={},
    )


class Recorder(Hardware):
    """Hardware that notes when what was generated and trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generated: list[tuple[float, float, int]] = []
        self.updates: list[tuple[float, float, int, int]] = []

    async def generate(self, num: int, lane: int = 0) -> None:
        began_s = asyncio.get_running_loop().time()
        await super().generate(num, lane)
        self.generated.append((began_s, asyncio.get_running_loop().time(), num))

    async def train(self, num: int, lag: int = 0) -> None:
        began_s = asyncio.get_running_loop().time()
        await super().train(num, lag)
        self.updates.append((began_s, asyncio.get_running_loop().time(), num, lag))


def measure(workload: Workload, scheduler: Run, drop: int, count: int, seed: int = 0, lanes: int = 1) -> Recorder:
    """Run until the tally is full, cancel, and look for what is left."""

    async def main() -> Recorder:
        hardware = Recorder(workload, Tally(drop, count), num_lanes=lanes, seed=seed)
        running = asyncio.ensure_future(scheduler(hardware))
        done = asyncio.ensure_future(hardware.tally.done.wait())
        await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.result()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return hardware

    return run_virtual(main())


def rate(workload: Workload, name: str, drop: int, count: int, **options: Any) -> float:
    return measure(workload, parse(name), drop, count, **options).tally.rates()["env_steps"]


def scripted(workload: Workload, serve: Callable[..., Coroutine[Any, Any, None]], asks: Sequence[float]) -> list[Any]:
    """Let units ask at given times, and return when batches of which size began."""

    async def main() -> list[Any]:
        hardware = Recorder(workload, Tally(0, 1))
        learner, requests = Learner(hardware), Requests()
        requests.playing = hardware.num_units
        serving = asyncio.ensure_future(serve(hardware, learner, requests))
        for unit, at_s in enumerate(asks):
            asyncio.get_running_loop().call_at(at_s, requests.ask, unit)
        await asyncio.sleep(20.0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        return [(pytest.approx(began_s), num) for began_s, _, num in hardware.generated]

    return run_virtual(main())


# Lock-step


def test_lockstep_alternates_batches_steps_resets_and_updates() -> None:
    rollout_s = HORIZON * STEP_S + HORIZON / CHUNK * GEN_S + RESET_S
    steps = NUM * HORIZON
    for trained, period_s in ((False, rollout_s), (True, rollout_s + UPDATE_S)):
        hardware = measure(make(trained=trained), parse("lockstep"), 2 * steps, 3 * steps)
        rates = hardware.tally.rates()
        assert rates["env_steps"] == pytest.approx(steps / period_s)
        assert rates["episodes"] == pytest.approx(NUM / period_s)
        assert rates["samples"] == pytest.approx(trained * steps / CHUNK / period_s)
        assert hardware.tally.batches == {NUM: 3 * HORIZON / CHUNK}
        assert set(hardware.tally.lags) <= {0}


def test_lockstep_queues_for_cores() -> None:
    workload = make(trained=False, cores=3)
    period_s = HORIZON * 3 * STEP_S + HORIZON / CHUNK * GEN_S + 3 * RESET_S  # 8 on 3 cores: three times
    assert rate(workload, "lockstep", 160, 480) == pytest.approx(NUM * HORIZON / period_s)


def test_waiting_after_every_action_costs_more_than_after_every_chunk() -> None:
    workload = make(trained=False, sim={"step_cv": 1.0})
    rates = []
    for per_action in (True, False):
        tally = measure(workload, partial(lockstep.run, per_action=per_action), 160, 1600).tally
        rates.append(tally.rates()["env_steps"])
        assert tally.env_steps / CHUNK <= tally.chunks <= tally.env_steps / CHUNK + NUM
    assert rates[0] < 0.95 * rates[1]


def test_two_stages_double_the_rate_where_simulation_takes_as_long_as_generation() -> None:
    endless = {"shortest_episode": 10**6, "horizon": 10**6}
    workload = make(trained=False, cores=2, chunk=1, fixed_s=0.0, per_sample_s=0.005, sim=endless)
    both_s = NUM / 2 * STEP_S + NUM * 0.005
    assert rate(workload, "lockstep", 80, 160) == pytest.approx(NUM / both_s)
    assert rate(workload, "pipeline:2", 80, 160) == pytest.approx(2 * NUM / both_s)
    assert rate(workload, "pipeline:1", 80, 160) == pytest.approx(NUM / both_s)


def test_stages_meet_for_the_update() -> None:
    hardware = measure(make(), parse("pipeline:4"), 320, 960)
    assert set(hardware.tally.lags) == {0}
    assert {num for _, _, num in hardware.generated} == {NUM // 4}
    assert not overlaps(hardware)


def overlaps(hardware: Recorder) -> bool:  # a batch began during an update
    return any(a < began < b for a, b, _, _ in hardware.updates for began, _, _ in hardware.generated)


# Asynchronous training


@pytest.mark.parametrize("name", ["async-train", "async-train:2", "async-train:1,8"])
def test_async_training_hides_the_shorter_of_rollout_and_update(name: str) -> None:
    quick = make(fixed_s=1e-9)
    rollout_s, steps = HORIZON * STEP_S + RESET_S, NUM * HORIZON
    assert rate(quick, "lockstep", steps, 4 * steps) == pytest.approx(steps / (rollout_s + UPDATE_S), rel=1e-6)
    update_s = quick.update_s(0.5 if "," in name else 1.0)  # a fixed share stays the same while the others idle
    assert rate(quick, name, 3 * steps, 4 * steps) == pytest.approx(steps / update_s, rel=1e-6)
    assert quick.training is not None
    quick = replace(quick, training=replace(quick.training, samples_per_s=quick.batch_size / (rollout_s / 2)))
    hardware = measure(quick, parse(name), 3 * steps, 4 * steps)
    assert hardware.tally.rates()["env_steps"] == pytest.approx(steps / rollout_s, rel=1e-6)
    assert hardware.tally.lags == {1: 4 * quick.batch_size}


def test_shares_are_set_or_refused() -> None:
    async def main() -> None:
        hardware = Hardware(make(), Tally(0, 1))
        partitions = []
        for gen_share in (None, 4):
            share(hardware, gen_share)
            assert hardware.machine.gpu is not None
            partitions.append(hardware.machine.gpu.partition)
        assert partitions == [None, {"gen": 4, "train": 12}]
        with pytest.raises(ConfigError, match="test: 16 SM units for generation leave none to train; it has 16"):
            await async_train.run(hardware, 1, 16)
        with pytest.raises(ConfigError, match="it trains nothing"):
            await size_timeout.run(Hardware(make(trained=False), Tally(0, 1)), 1, 0.1, 4)

    run_virtual(main())


def test_back_pressure_bounds_the_lag_however_slow_the_learner_is() -> None:
    workload = make(sim={"step_cv": 1.0})
    assert workload.training is not None
    workload = replace(workload, training=replace(workload.training, samples_per_s=5.0))
    for name in ("async-train", "async-train:4", "size-timeout-free:2,0.1"):
        hardware = measure(workload, parse(name), 640, 1600)
        assert set(hardware.tally.lags) == {1}, name


def test_the_learner_drops_what_is_too_old_and_takes_the_oldest_of_the_rest() -> None:
    async def main() -> None:
        hardware, notes = Recorder(make(), Tally(0, 1)), list[tuple[bool, bool]]()
        learner = Learner(hardware, staleness=1)
        size = learner.batch_size
        assert [learner.room(num) for num in (2 * size, 2 * size + 1)] == [True, False]
        await learner.begin(2 * size)
        learner.version = 3
        learner.add(1, 5)
        learner.add(2, size)
        taken = asyncio.ensure_future(learner.bell.until(lambda: not learner.full))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(UPDATE_S / 2, lambda: notes.append((learner.updating, taken.done())))
        await learner.update()
        assert notes == [(True, True)]
        assert (learner.dropped, learner.ready, learner.version) == (5, 0, 4)
        learner.add(3, 4)
        learner.add(4, 3)
        assert not learner.full
        await learner.update()  # too few
        learner.add(4, size)
        await learner.update()
        assert (learner.dropped, learner.ready, learner.version) == (5, 7, 5)
        assert [update[2:] for update in hardware.updates] == [(size, 1), (4, 1), (size - 4, 0)]
        assert hardware.updates[0][1] - hardware.updates[0][0] == pytest.approx(UPDATE_S)
        assert [learner.room(5 * size + num) for num in (5, 6)] == [True, False]  # what was dropped does not count

    run_virtual(main())


# Size or timeout


def by_size(size: int, timeout_s: float) -> Callable[..., Coroutine[Any, Any, None]]:
    return lambda hardware, learner, requests: size_timeout.batch(hardware, learner, requests, size, timeout_s)


def test_a_batch_begins_at_its_size_or_when_the_timer_of_the_free_batcher_runs_out() -> None:
    workload = make(trained=False, fixed_s=0.5)
    asks = [0.1, 0.2, 1.6, 1.7, 1.8, 1.9, 5.0, 5.0]
    # 1.0: the timer; 1.8: three are there; 3.3: the timer again; then it is long over, and the first goes alone
    assert scripted(workload, by_size(3, 1.0), asks) == [(1.0, 2), (1.8, 3), (3.3, 1), (5.0, 1), (6.5, 1)]
    assert scripted(workload, by_size(3, 0.0), asks[:3]) == [(0.1, 1), (0.6, 1), (1.6, 1)]


def test_a_batched_simulator_that_overshoots_the_size_is_taken_whole() -> None:
    batched = {"kind": "gpu-batched", "slots_per_unit": 2, "sm_share": 0.5}
    assert scripted(make(trained=False, fixed_s=0.5, sim=batched), by_size(3, 9.0), [1.0, 2.0, 3.0]) == [
        (2.0, 2),
        (11.5, 1),
    ]


def test_a_batch_does_not_wait_for_units_at_a_barrier() -> None:
    for name in ("size-timeout:3,1000", "size-timeout-free:3,1000"):  # no batch of decisions is a multiple of 3
        assert rate(make(sim={"step_cv": 1.0}), name, 160, 480) > 10.0, name


def test_the_epoch_barrier_gives_every_unit_the_same_number_of_decisions_of_one_version() -> None:
    workload = make(sim={"step_cv": 1.0, "reset_s": 0.0})
    chunks = HORIZON // CHUNK
    held = measure(workload, parse("size-timeout:2,0.1"), 160, 800)
    assert set(held.tally.lags) == {0}
    total = 0
    for began_s, _, num in held.generated:  # a rollout has been trained before the next begins
        total += num
        trained = sum(update[2] for update in held.updates if update[1] <= began_s)
        assert total <= trained // (NUM * chunks) * NUM * chunks + NUM * chunks
    assert total > 2 * NUM * chunks
    free = measure(workload, parse("size-timeout-free:2,0.1"), 160, 800)
    assert set(free.tally.lags) <= {0, 1}
    assert 1 in free.tally.lags
    assert free.tally.rates()["env_steps"] > held.tally.rates()["env_steps"]


def test_the_streamer_trains_as_environments_end_their_epoch() -> None:
    hardware = measure(make(sim={"step_cv": 1.0, "reset_s": 0.0}), parse("size-timeout:1,0"), 160, 480)
    parts = [num for _, _, num, _ in hardware.updates]
    assert parts[0] == HORIZON // CHUNK  # of the first to be there
    assert {num % parts[0] for num in parts} == {0}
    assert overlaps(hardware)


# VER


def test_the_thresholds_of_ver() -> None:
    assert [ver.thresholds(6, workers) for workers in (1, 2, 4)] == [(4, 9), (2, 4), (1, 2)]
    assert ver.thresholds(64, 2) == (21, 48)
    assert ver.thresholds(1, 2) == (1, 1)


def test_a_worker_of_ver_waits_for_half_of_what_its_batches_take() -> None:
    workload = make(trained=False, fixed_s=1.0)  # one worker: from 5 to 12 of 8

    def serve(hardware: Hardware, learner: Learner, requests: Requests) -> Coroutine[Any, Any, None]:
        return ver.infer(hardware, learner, requests, 1)

    asks = [0.001, 1.2, 2.6, 2.6, 2.6, 2.65, 2.65, 9.0]
    # after 10 ms; half a second after the end at 1.01; at once with five; long overdue
    assert scripted(workload, serve, asks) == [(0.01, 1), (1.51, 1), (2.65, 5), (9.0, 1)]


def test_ver_generates_during_updates_only_if_they_overlap() -> None:
    workload = make(sim={"step_cv": 1.0})
    apart = measure(workload, parse("ver:2"), 160, 1600)
    beside = measure(workload, parse("ver-overlap:2"), 160, 1600)
    assert not overlaps(apart)
    assert overlaps(beside)
    assert set(apart.tally.lags) == {0, 1}
    assert apart.tally.lags[1] <= NUM * len(apart.updates)  # steps in flight only
    assert set(beside.tally.lags) <= {0, 1, 2}
    quick = make(sim={"step_cv": 1.0}, fixed_s=1e-6)
    assert rate(quick, "ver-overlap", 480, 4800) == pytest.approx(NUM * HORIZON / UPDATE_S, rel=0.02)


def test_ver_collects_more_from_whoever_is_faster() -> None:
    hardware = measure(load_w("W3", 16), parse("ver"), 1000, 4000)
    assert hardware.tally.rates()["env_steps"] > 3 * rate(load_w("W3", 16), "lockstep", 1000, 4000)


# The first K


def test_envpool_takes_exactly_k_and_tianshou_all_that_are_ready() -> None:
    workload = load_w("W5a", 8)
    assert set(measure(workload, parse("wait-num:3"), 100, 2000).tally.batches) == {3}
    sizes = set(measure(workload, parse("tianshou:3"), 100, 2000).tally.batches)
    assert 3 <= min(sizes) < max(sizes)


def test_a_reset_that_all_wait_for_hurts_most_where_resets_are_slow() -> None:
    w2, w4 = load_w("W2", 16), load_w("W4", 16)
    assert rate(w2, "tianshou:8", 1000, 4000) == pytest.approx(rate(w2, "wait-num:8", 1000, 4000), rel=0.1)
    assert rate(w4, "tianshou:8", 1000, 4000) < rate(w4, "wait-num:8", 1000, 4000) / 4


def test_waiting_for_all_is_lockstep() -> None:
    workload = load_w("W3", 8)
    assert rate(workload, "wait-num:8", 80, 800) == pytest.approx(rate(workload, "lockstep", 80, 800))


def test_more_than_there_are_is_refused() -> None:
    async def main(run: Run, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            await run(Hardware(make(), Tally(0, 1)))

    run_virtual(main(lambda hardware: wait_num.run(hardware, 9), "9 of 8 units are never ready"))
    run_virtual(main(parse("pipeline:9"), "9 stages cannot be made of 8 units, only 1 to 8"))


# All of them


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_that_is_generated_is_stepped(name: str, trained: bool) -> None:
    workload = make(trained=trained, cores=3, sim={"step_cv": 1.0, "shortest_episode": 5})
    hardware = measure(workload, parse(settings(name, workload)[-1]), 200, 1000)
    tally = hardware.tally
    generated = sum(num for _, _, num in hardware.generated)
    assert 0 <= generated - tally.chunks <= NUM
    assert tally.samples <= tally.chunks
    assert tally.samples >= trained * (tally.chunks - 3 * workload.batch_size)
    assert trained == (tally.samples > 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_seeds_give_equal_results(name: str) -> None:
    workload = make(cores=3, sim={"step_cv": 1.0, "shortest_episode": 5})
    runs = [measure(workload, parse(settings(name, workload)[-1]), 200, 1000, seed=seed) for seed in (1, 1, 2)]
    notes = [(run.generated, run.updates, run.tally.rates()) for run in runs]
    assert notes[0] == notes[1]
    assert notes[0] != notes[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_several_lanes_are_used_or_left_alone(name: str) -> None:
    workload = load_w("W5a", 8)
    one, two = (measure(workload, parse(settings(name, workload)[-1]), 200, 1000, lanes=lanes) for lanes in (1, 2))
    assert two.tally.rates()["env_steps"] >= 0.99 * one.tally.rates()["env_steps"]


@pytest.mark.parametrize("name", ["lockstep", "size-timeout:1,1000", "size-timeout-free:1,1000", "wait-num:1", "ver"])
def test_splitting_a_batched_simulator_loses(name: str) -> None:
    workload = load_pair("maniskill", "pi05", "h200")
    assert workload.training is not None
    workload = replace(workload, training=replace(workload.training, samples_per_s=1e5))
    steps = workload.batch_size * workload.policy.chunk
    rates = [
        rate(replace(workload, simulator=replace(workload.simulator, slots_per_unit=slots)), name, steps, 2 * steps)
        for slots in (320, 80, 20)
    ]
    assert rates[0] > 1.2 * rates[1] > 1.2 * 1.2 * rates[2]


# Names


def test_every_setting_of_every_family_can_be_parsed() -> None:
    workloads = [make(), make(trained=False), load_w("W3", 64), load_w("W1", 1)]
    workloads += [load_pair(simulator, "pi05", "h200") for simulator in ("libero", "maniskill")]
    for name in FAMILIES:
        for workload in workloads:
            texts = settings(name, workload)
            assert 1 <= len(texts) <= 12
            assert len(set(texts)) == len(texts)
            assert all(text.split(":")[0] == name and parse(text) for text in texts)
    assert settings("pipeline", workloads[0]) == ["pipeline:1", "pipeline:2", "pipeline:4"]
    assert settings("async-train", workloads[0])[4:8] == [f"async-train:2{g}" for g in ("", ",4", ",8", ",12")]
    assert settings("wait-num", workloads[2]) == [f"wait-num:{k}" for k in (8, 16, 32, 48, 64)]
    assert "size-timeout:160,1000" in settings("size-timeout", workloads[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("greedy", "there is no scheduler 'greedy'; there are lockstep, pipeline:K, async-train[:K[,G]], "),
        ("lockstep:1", "'lockstep:1' is not of the form lockstep; there are lockstep, "),
        ("pipeline", "'pipeline' is not of the form pipeline:K; there are"),
        ("pipeline:0", "is not of the form"),
        ("size-timeout:1.5,0.2", "is not of the form"),
        ("size-timeout:12,nan", "is not of the form"),
        ("ver:1,2", "is not of the form ver[:W]"),
    ],
)
def test_wrong_names_get_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="there is no scheduler 'fixed'; there are lockstep, pipeline"):
        settings("fixed", make())


def test_an_answer_is_of_the_version_that_began_it_and_skips_a_unit_that_was_cancelled() -> None:
    async def main() -> None:
        hardware = Hardware(make(), Tally(0, 1))
        requests, learner = Requests(), Learner(hardware)
        first, second = requests.ask(0), requests.ask(1, ended=True)
        first.cancel()
        asked: list[Request] = requests.take(5)
        assert [(request.unit, request.ended) for request in asked] == [(0, False), (1, True)]
        asyncio.get_running_loop().call_later(GEN_S / 2, setattr, learner, "version", 1)
        await answer(hardware, learner, asked)
        assert second.result() == 0
        assert first.cancelled()

    run_virtual(main())
