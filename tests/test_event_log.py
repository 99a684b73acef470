"""A log that somebody has edited is refused in one line, whatever it says; nothing else comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError
from ebrl.core.records import TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.gen.generator import Generator
from ebrl.replayer import replay
from ebrl.sim.group import EnvGroup
from ebrl.train.trainer import Trainer
from tests.helpers import PATIENT
from tests.test_replay import LENGTHS, Watched, heavy_tails, lines, make, record, write

pytestmark = [
    pytest.mark.blocks("a replay builds simulators, and reads its log, where it runs: nobody waits for its loop"),
    pytest.mark.hogs("a replay learns in the thread of its loop"),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return the log of a short run."""
    path = tmp_path / "events.jsonl"
    run_virtual(record(path, heavy_tails(0), updates=3))
    return path


def put(*place: Any, value: Any) -> Callable[[list[Any]], None]:
    def edit(log: list[Any]) -> None:
        for key in place[:-1]:
            log = log[key]
        log[place[-1]] = value

    return edit


def without(line: int, key: str) -> Callable[[list[Any]], None]:
    return lambda log: log[line].pop(key)


def twice(log: list[Any]) -> None:
    """Train the first decision of a piece twice, and its last one not at all."""
    batch = log[2]["batch"]
    at = next(i for i, piece in enumerate(batch) if piece[2] > 1)
    env, first, num, reason, advantage = batch[at]
    batch[at : at + 1] = [[env, first, num - 1, reason, advantage], [env, first, 1, reason, advantage]]


EDITS: dict[str, tuple[Callable[[list[Any]], None], str]] = {
    "a number": (put(2, value=5), "line 3 is damaged: TypeError"),
    "null": (put(2, value=None), "line 3 is damaged: TypeError"),
    "no groups": (without(0, "groups"), "line 1 is damaged: groups is {}"),
    "no trainers": (put(0, "trainers", value={}), "line 1 is damaged: trainers is {}"),
    "no generators": (without(0, "generators"), "gen, who acted there, was no Generator: no replay can"),
    "no seed": (without(0, "seed"), "line 1 is damaged: it does not tell the seed"),
    "no count": (put(0, "groups", "envs", "count", value="6"), r"line 1 .*of envs \(groups\) it does not tell count"),
    "odd groups": (put(0, "groups", "envs", "group_size", value=4), "line 1 .*envs has 6 environments in groups of 4"),
    "no thread": (put(0, "trainers", "trainer", "threads", value=0), "line 1 .*of trainer .* not tell threads"),
    "unknown env": (put(2, "batch", 0, 0, value=77), "line 3 is damaged: decisions .* of env 77 are trained, which"),
    "unknown taken env": (put(2, "taken", 0, 0, value=99), "line 3 is damaged: env 99 of 6 environments"),
    "fewer envs": (put(0, "groups", "envs", "count", value=3), "line 2 is damaged: env . of 3 environments"),
    "longer piece": (put(2, "batch", 0, 2, value=50), "line 3 is damaged: the batch has .* decisions, not 24"),
    "trained twice": (twice, "line 3 is damaged: decisions .* are trained, which are not"),
    "empty batch": (put(2, "batch", value=[]), "line 3 is damaged: the batch has 0 decisions, not 24"),
    "short weights": (put(2, "weights", value=[1.0]), "line 3 is damaged: the weights are not one for each decision"),
    "a check less": (put(2, "taken", 0, 4, value="00" * 12), "line 3 is damaged: 1 checks of decisions"),
    "another place": (put(2, "taken", 0, 2, value=40), "line 3 is damaged: decision 40 of env . comes after"),
    "a later version": (put(1, "taken", 0, 3, 0, 0, value=9), "line 2 is damaged: decision 0 of env . was made with"),
    "a reason": (put(1, "batch", 0, 3, value="why"), "line 2 is damaged: a piece of the batch has 'why' and None"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_log_is_refused_with_the_number_of_the_line(name: str, recorded: Path) -> None:
    edit, words = EDITS[name]
    log = lines(recorded)
    edit(log)
    with pytest.raises(ConfigError, match=words):
        replay(write(recorded, log), LENGTHS, make())


def places(value: Any, *place: Any) -> list[tuple[Any, ...]]:
    """Return the way to everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, part in inner for found in places(part, *place, key))]


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_log_says_there_is_a_report_or_one_line(recorded: Path, data: st.DataObject) -> None:
    log = lines(recorded)[:3]
    del log[0]["ebrl"]
    place = data.draw(st.sampled_from([place for place in places(log) if len(place) > 1]))
    put(*place, value=data.draw(st.sampled_from([None, True, -1, 0, 3, 1.5, "", "ab", [], {}, [[]], 10**30])))(log)
    with suppress(ConfigError):
        replay(write(recorded.with_name("edited"), log), LENGTHS, make())


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_where_an_update_fails_the_log_ends_with_that(failing: int, tmp_path: Path) -> None:
    """It has changed weights, perhaps: what follows is no matter of who replays."""
    log = tmp_path / "log"

    class Fails(Watched):
        calls = 0

        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            metrics = super().update(batch)
            self.calls += 1
            if self.calls == failing:
                raise ValueError("half done")
            return metrics

    async def main() -> None:
        whole = make()
        learner = Fails(whole.policy, whole.config)
        async with Runtime(heavy_tails(0), seed=3, record=log) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, failures=PATIENT))
            trainer = rt.start(Trainer(envs, learner, updates=6))
            for update in range(1, 7):
                if update == failing:
                    with pytest.raises(ValueError, match="half done"):
                        await anext(trainer)
                await anext(trainer)

    run_virtual(main())
    entries, why = lines(log), "an update before this one failed"
    assert [entry["update"] for entry in entries[1:-1]] == list(range(1, failing))
    assert entries[-1] == {"unreplayable": why}
    report = replay(log, LENGTHS, make())
    told = f"what follows cannot be repeated: {why}"
    assert (report.mismatch, report.updates, report.end) == (None, failing - 1, told)


def test_where_what_came_of_an_update_is_not_published_the_log_ends_with_that(tmp_path: Path) -> None:
    """Somebody else published meanwhile: then versions are as many as updates, and yet other weights acted."""
    log = tmp_path / "log"

    async def main() -> None:
        learner, other = make(), make()
        async with Runtime(heavy_tails(0), seed=3, record=log) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, failures=PATIENT))
            trainer = rt.start(Trainer(envs, learner, updates=6))
            await anext(trainer)
            gen.weights._publishing = True
            with pytest.raises(ConfigError, match="two publish to one generator at once"):
                await anext(trainer)
            gen.weights._publishing = False
            await gen.publish(other.policy)
            async for _ in trainer:
                pass

    run_virtual(main())
    assert lines(log)[-1] == {"unreplayable": "an update before this one failed"}
    assert [entry["update"] for entry in lines(log)[1:-1]] == [1, 2]
