"""The recursion against vectors worked out by hand in exact fractions, and against what must always hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebrl.train.advantages import Steps, Targets, chunk_reward, gae, group_advantages, tells_apart, vtrace

HALF = 0.5


def column(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def flags(num: int, *where: int) -> Tensor:
    return torch.tensor([t in where for t in range(num)])


def three_steps(*, after: Tensor, terminated: tuple[int, ...] = (), cut: tuple[int, ...] = (2,)) -> Steps:
    """Rewards 1, 2, 3 and values 1, 2, 2 with gamma 1/2."""
    discount = column(HALF, HALF, HALF)
    return Steps(column(1, 2, 3), discount, column(1, 2, 2), after, flags(3, *terminated), flags(3, *cut))


def assert_targets(targets: Targets, advantage: Tensor, returns: Tensor) -> None:
    torch.testing.assert_close(targets.advantage_TS, advantage, rtol=0, atol=1e-12)
    torch.testing.assert_close(targets.return_TS, returns, rtol=0, atol=1e-12)


def weighted(targets: Targets, weight: Tensor) -> Targets:
    """Return what IMPALA's policy gradient has: the losses of this library weigh decisions themselves."""
    return targets._replace(advantage_TS=weight.clamp(max=1.0) * targets.advantage_TS)


def test_a_segment_that_ends_within_an_episode_bootstraps() -> None:
    targets = gae(three_steps(after=column(2, 2, 4)), lam=HALF)
    assert_targets(targets, column(23 / 16, 7 / 4, 3), column(39 / 16, 15 / 4, 5))


def test_a_terminated_episode_does_not_bootstrap() -> None:
    targets = gae(three_steps(after=column(2, 2, 4), terminated=(2,)), lam=HALF)
    assert_targets(targets, column(21 / 16, 5 / 4, 1), column(37 / 16, 13 / 4, 3))


def test_truncation_bootstraps_from_the_true_final_observation() -> None:
    targets = gae(three_steps(after=column(2, 6, 4), terminated=(2,), cut=(1, 2)), lam=HALF)
    assert_targets(targets, column(7 / 4, 3, 1), column(11 / 4, 5, 3))


def test_the_two_usual_mistakes_at_truncation_give_other_numbers() -> None:
    """What is published as wrong must be reproducible as wrong: the vectors tell the cases apart."""
    reset_value = gae(three_steps(after=column(2, 2, 4), terminated=(2,), cut=(1, 2)), lam=HALF)
    assert_targets(reset_value, column(5 / 4, 1, 1), column(9 / 4, 3, 3))
    as_termination = gae(three_steps(after=column(2, 6, 4), terminated=(1, 2), cut=(1, 2)), lam=HALF)
    assert_targets(as_termination, column(1, 0, 1), column(2, 2, 3))


def test_vtrace_truncates_its_weights() -> None:
    weight = column(2, HALF, 1)
    targets = weighted(vtrace(three_steps(after=column(2, 2, 4)), weight), weight)
    assert_targets(targets, column(13 / 8, 5 / 4, 3), column(21 / 8, 13 / 4, 5))


def test_vtrace_with_other_caps() -> None:
    """Weights 2, 1/2, 1; deltas 1, 1, 3. With caps of 2: 2 + 1/2 2 (1/2 + 1/2 1/2 3) and so on."""
    steps, weight = three_steps(after=column(2, 2, 4)), column(2, HALF, 1)
    targets = vtrace(steps, weight, rho_bar=2.0, c_bar=2.0)
    close(targets.return_TS - steps.value_TS, column(2 + 5 / 4, HALF + 3 / 4, 3))
    targets = vtrace(steps, weight, rho_bar=2.0, c_bar=1.0)
    close(targets.return_TS - steps.value_TS, column(2 + 5 / 8, HALF + 3 / 4, 3))


def test_vtrace_on_policy_is_the_n_step_return() -> None:
    targets = vtrace(three_steps(after=column(2, 2, 4)), column(1, 1, 1))
    assert_targets(targets, column(9 / 4, 5 / 2, 3), column(13 / 4, 9 / 2, 5))


def test_vtrace_over_mixed_versions() -> None:
    """Four decisions of three versions in one segment; weights 1/2, 3/2, 1, 1."""
    half, weight = column(HALF, HALF, HALF, HALF), column(HALF, 1.5, 1, 1)
    steps = Steps(column(0, 0, 0, 1), column(1, 1, 1, 1), half, half, flags(4, 3), flags(4, 3))
    targets = weighted(vtrace(steps, weight), weight)
    assert_targets(targets, column(1 / 4, HALF, HALF, HALF), column(3 / 4, 1, 1, 1))


@pytest.mark.parametrize(
    ("rewards", "terminated", "reward", "discount", "delta"),
    [
        ([1, 1, 1, 1], False, 15 / 8, 1 / 16, 11 / 8),
        ([1, 1], True, 3 / 2, 1 / 4, 1 / 2),
        ([1, 1], False, 3 / 2, 1 / 4, 5 / 2),
    ],
    ids=["whole chunk", "terminated in the chunk", "truncated in the chunk"],
)
def test_chunks_discount_by_executed_steps(
    rewards: list[float], terminated: bool, reward: float, discount: float, delta: float
) -> None:
    assert chunk_reward(rewards, HALF) == reward
    assert HALF ** len(rewards) == discount
    one = flags(1, 0)
    steps = Steps(column(reward), column(discount), column(1), column(8), one & terminated, one)
    assert gae(steps, lam=HALF).advantage_TS.tolist() == [delta]


def test_two_chunks() -> None:
    reward = column(chunk_reward([1, 2], HALF), chunk_reward([4], HALF))
    assert reward.tolist() == [2, 4]
    steps = Steps(reward, column(1 / 4, HALF), column(1, 2), column(2, 0), flags(2, 1), flags(2, 1))
    assert_targets(gae(steps, lam=HALF), column(7 / 4, 2), column(11 / 4, 4))


def test_a_decision_without_rewards_is_worth_nothing() -> None:
    assert chunk_reward([], HALF) == 0


numbers = st.floats(-5, 5, width=32)
weights = st.floats(0.0625, 4, width=32)
unit = st.floats(0, 1, width=32)


@st.composite
def segments(draw: st.DrawFn, min_size: int = 1) -> tuple[Steps, Tensor]:
    """Draw one segment with consistent values, and weights."""
    num = draw(st.integers(min_size, 8))

    def some(numbers: st.SearchStrategy[float]) -> Tensor:
        return column(*draw(st.lists(numbers, min_size=num, max_size=num)))

    value = some(numbers)
    after = torch.cat([value[1:], column(draw(numbers))])
    terminated = flags(num, num - 1) & draw(st.booleans())
    return Steps(some(numbers), some(unit), value, after, terminated, flags(num, num - 1)), some(weights)


def n_step_returns(steps: Steps) -> Tensor:
    """The definition, term by term."""
    num = len(steps.reward_TS)
    returns = []
    for t in range(num):
        total, factor = 0.0, 1.0
        for k in range(t, num):
            total += factor * float(steps.reward_TS[k])
            factor *= float(steps.discount_TS[k])
        bootstrap = 0.0 if bool(steps.terminated_TS[-1]) else float(steps.next_value_TS[-1])
        returns.append(total + factor * bootstrap)
    return column(*returns)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


quick = settings(max_examples=40, deadline=None)


@quick
@given(segments())
def test_lambda_one_on_policy_gives_the_n_step_return(drawn: tuple[Steps, Tensor]) -> None:
    steps, weight = drawn
    close(gae(steps, lam=1.0).return_TS, n_step_returns(steps))
    close(vtrace(steps, torch.ones_like(weight)).return_TS, n_step_returns(steps))


@quick
@given(segments())
def test_vtrace_with_one_kind_of_weight_learns_what_it_values(drawn: tuple[Steps, Tensor]) -> None:
    steps, weight = drawn
    targets = weighted(vtrace(steps, weight), weight)
    close(targets.advantage_TS, targets.return_TS - steps.value_TS)


@quick
@given(segments(min_size=2), st.data())
def test_with_lambda_zero_a_split_changes_nothing(drawn: tuple[Steps, Tensor], data: st.DataObject) -> None:
    steps, weight = drawn
    cut = steps.cut_TS | flags(len(steps.cut_TS), data.draw(st.integers(0, len(steps.cut_TS) - 2)))
    close(gae(steps, lam=0.0).advantage_TS, gae(steps._replace(cut_TS=cut), lam=0.0).advantage_TS)
    whole, parts = (vtrace(s, weight, lam=0.0) for s in (steps, steps._replace(cut_TS=cut)))
    close(whole.return_TS, parts.return_TS)


@quick
@given(st.lists(segments(), min_size=1, max_size=5), unit, st.data())
def test_neither_padding_nor_order_matters(drawn: list[tuple[Steps, Tensor]], lam: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(drawn))))
    num = max(len(weight) for _, weight in drawn) + data.draw(st.integers(0, 2))

    def table(field: str) -> Tensor:
        rows: list[Any] = [getattr(drawn[s][0], field) for s in order]
        padded = torch.full((num, len(rows)), field == "cut_TS", dtype=rows[0].dtype)
        for s, row in enumerate(rows):
            padded[: len(row), s] = row
        return padded

    steps = Steps(*(table(field) for field in Steps._fields))
    weight = torch.zeros(num, len(order), dtype=torch.float64)
    for s, k in enumerate(order):
        weight[: len(drawn[k][1]), s] = drawn[k][1]
    for together, alone in (
        (gae(steps, lam=lam), [gae(steps, lam=lam) for steps, _ in drawn]),
        (vtrace(steps, weight, lam=lam), [vtrace(steps, weight, lam=lam) for steps, weight in drawn]),
    ):
        for s, k in enumerate(order):
            size = len(alone[k].advantage_TS)
            close(together.advantage_TS[:size, s], alone[k].advantage_TS)
            close(together.return_TS[:size, s], alone[k].return_TS)
            assert not together.advantage_TS[size:, s].any()


@quick
@given(segments(), unit)
def test_termination_wins_over_truncation(drawn: tuple[Steps, Tensor], lam: float) -> None:
    steps, weight = drawn
    both = steps._replace(terminated_TS=steps.cut_TS)
    other = both._replace(next_value_TS=torch.where(steps.cut_TS, torch.nan, steps.next_value_TS))
    close(gae(both, lam=lam).advantage_TS, gae(other, lam=lam).advantage_TS)
    close(vtrace(both, weight, lam=lam).return_TS, vtrace(other, weight, lam=lam).return_TS)


@pytest.mark.parametrize(
    ("returns", "advantages"),
    [
        ([1, 0, 0, 1], [0.8660, -0.8660, -0.8660, 0.8660]),  # with the deviation of a population: 1 and -1
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ([3, 3, 3], [0, 0, 0]),
        ([0, 1e-9], [-1e-9 / 2 / 1e-6, 1e-9 / 2 / 1e-6]),
    ],
)
def test_advantages_within_a_group(returns: list[float], advantages: list[float]) -> None:
    assert group_advantages(returns) == pytest.approx(advantages, rel=2e-3, abs=1e-12)


def test_a_group_of_one_has_no_advantage() -> None:
    with pytest.raises(AssertionError, match="group of one"):
        group_advantages([1.0])


@pytest.mark.parametrize(("num_good", "size", "says"), [(0, 8, 0), (1, 10, 1), (9, 10, 1), (8, 8, 0), (1, 11, 0)])
def test_a_group_tells_apart_if_some_succeed_and_some_fail(num_good: int, size: int, says: bool) -> None:
    """Bounds of 0.1 and 0.9, inclusive."""
    assert tells_apart([i < num_good for i in range(size)]) == says
