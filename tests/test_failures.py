"""What is decided about failures, purely: budgets within an hour, rows, and who is the last."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError
from ebrl.sim.failures import HOUR_S, Drop, FailurePolicy, Failures, Phase, Restart, Stop

NUM_ENVS = 3
POLICIES = st.builds(
    FailurePolicy,
    st.just("restart"),
    per_env=st.none() | st.integers(0, 4),
    per_hour=st.none() | st.integers(0, 6),
    backoff_s=st.floats(0, 5),
    max_backoff_s=st.floats(0, 50),
)
EVENTS = st.lists(
    st.tuples(st.integers(0, NUM_ENVS - 1), st.floats(0, 900), st.sampled_from(["guilty", "innocent", "well"])),
    max_size=60,
)


@given(POLICIES, EVENTS)
def test_no_hour_has_more_restarts_than_the_budgets_and_no_failure_within_them_stops_the_run(
    policy: FailurePolicy, events: list[tuple[int, float, str]]
) -> None:
    failures, now_s = Failures(policy, [""] * NUM_ENVS), 0.0
    restarts: list[tuple[int, float]] = []
    row, num_innocent = [0] * NUM_ENVS, 0
    for env, after_s, what in events:
        now_s += after_s
        if what == "well":
            failures.went_well(env)
            row[env] = 0
            continue
        verdict = failures.decide(env, now_s, charged=what == "guilty")
        if what == "innocent":
            assert verdict == Restart(0.0)
            num_innocent += 1
            continue
        recent = [who for who, at_s in restarts if at_s > now_s - HOUR_S]
        spent = policy.per_env is not None and recent.count(env) >= policy.per_env
        spent |= policy.per_hour is not None and len(recent) >= policy.per_hour
        assert isinstance(verdict, Stop) == spent
        if isinstance(verdict, Restart):
            wanted_s = policy.backoff_s * 2 ** (row[env] - 1) if row[env] else 0.0
            assert math.isclose(verdict.after_s, min(wanted_s, policy.max_backoff_s), abs_tol=1e-12)
            restarts.append((env, now_s))
            row[env] += 1
    assert failures.num_restarts == len(restarts) + num_innocent


@given(st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_last_environment_of_a_task_is_not_dropped(tasks: list[str], random: Any) -> None:
    failures = Failures(FailurePolicy("drop"), tasks)
    order = random.sample(range(len(tasks)), len(tasks))
    left = {task: tasks.count(task) for task in tasks}
    for env in order:
        left[tasks[env]] -= 1
        verdict = failures.decide(env, 0.0)
        assert verdict == Drop() if left[tasks[env]] else isinstance(verdict, Stop)
        assert failures.decide(env, 0.0, charged=False) == Restart(0.0)


def test_a_row_that_never_ends_waits_its_longest_time_and_costs_no_memory() -> None:
    failures = Failures(FailurePolicy(per_env=None, max_backoff_s=30.0), [""])
    verdicts = [failures.decide(0, float(i)) for i in range(2000)]
    assert verdicts[:4] == [Restart(0.0), Restart(1.0), Restart(2.0), Restart(4.0)]
    assert verdicts[-1] == Restart(30.0)
    assert not failures._of_all
    assert not failures._of_env[0]


@pytest.mark.parametrize(
    "options",
    [
        {"action": "ignore"},
        {"build_s": 0.0},
        {"reset_s": -1.0},
        {"call_s": math.nan},
        {"per_env": -1},
        {"per_hour": -1},
        {"backoff_s": -0.1},
        {"max_backoff_s": math.nan},
        {"action": None},
        {"action": ["restart"]},
        {"call_s": "60"},
        {"build_s": True},
        {"per_env": 1.5},
        {"per_hour": True},
        {"backoff_s": None},
        {"max_backoff_s": "1"},
    ],
)
def test_a_policy_out_of_range_names_its_field(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FailurePolicy(**options)


def test_the_shortest_deadline_and_those_of_each_phase() -> None:
    policy = FailurePolicy(build_s=None, reset_s=9.0, call_s=3.0)
    assert policy.shortest_s == 3.0
    assert [policy.deadline_s(phase) for phase in get_args(Phase)] == [None, 9.0, 3.0, 3.0, 3.0]
    assert FailurePolicy(build_s=None, reset_s=None, call_s=None).shortest_s is None
