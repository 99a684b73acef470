"""Options that all recipes have, and how options are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Final, Literal, TypeAlias, get_args

from ebrl.core.errors import ConfigError, is_a, whole
from ebrl.core.protocols import Learner

Objective: TypeAlias = Literal["decoupled", "ppo", "uncorrected"]
RatioLevel: TypeAlias = Literal["token", "action", "decision"]
BeyondCap: TypeAlias = Literal["clamp", "mask"]
Proximal: TypeAlias = Literal["start", "ewma"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """Options of every recipe: of its gradient steps, and of the policy loss for data of older versions.

    Attributes:
        batch_size: B, decisions per update; with `GRPO` at least so many, since groups are not split.
        epochs: Passes over the batch.
        minibatch_size: Decisions per gradient step, with memory or groups about so many; divides `batch_size`. A policy
            with memory learns through at most half as many decisions in a row.
        learning_rate: Of Adam.
        clip_range: How far a ratio may move before its gradient stops. It belongs to `ratio_level`: log-ratios add up
            over the H * A numbers of a decision, so that the same range binds sooner there. Usual are 0.2 per decision,
            for up to some 50 numbers (CleanRL, Stable-Baselines3), 0.2 to 0.3 per action (RLinf), and per token 0.2,
            with 0.28 above (SimpleVLA-RL).
        clip_range_high: Upward, where that shall differ ("clip-higher" of DAPO, arXiv:2503.14476); None: as downward.
        ratio_level: What ratios are taken of. ``decision``: the whole chunk (Gaussian heads); ``action``: each of
            its H actions; ``token``: each of the A numbers in them (autoregressive heads).
        objective: What is done about data of older versions. ``decoupled`` (Hilton et al. 2021, AReaL): the clip is
            around the weights that the update starts from, times the weight from those that acted to them; at lag 0
            that is PPO. ``ppo``: the clip is around the weights that acted, so that old data are clipped away.
            ``uncorrected``: old data are taken for new; only good as a control.
        behaviour_weight: With ``decoupled``, what happens to weights above the cap. ``clamp``: they are the cap
            (truncated importance sampling, verl); ``mask``: they are 0, and still count in denominators (AReaL).
        behaviour_weight_cap: See there; 2 as in RLinf and verl.
        dual_clip: Bound c of ``-u A`` by ``-c A`` where A < 0 (Ye et al. 2020, arXiv:1912.09729), before the behaviour
            weight; RLinf has 3. None: no bound.
        m2_threshold: Mask the largest log-weights until the mean of their squares is below this (M2PO,
            arXiv:2510.01161; AReaL's example has 0.04); masked ones still count in denominators. Over the batch; with
            ``proximal="ewma"``, whose weights change with every step, over each minibatch. None: mask none.
        proximal: With ``decoupled``, which weights the clip is around. ``start``: those that the update starts from;
            ``ewma``: their moving average (PPO-EWMA, Hilton et al. 2021), which does not depend on the batch's size;
            with their correction for its beginning, in which there are few weights to average.
        proximal_decay: Of that average, per gradient step. An average over the last n steps has 1 - 1 / n; the paper
            has 0.889.
        entropy_coef: Weight of the entropy of a decision: the sum over the actions that were executed.
        max_grad_norm: Gradients are scaled down to it.
        adam_eps: Of Adam.
        anneal_updates: The learning rate goes linearly to 0 over so many updates, and stays there; None leaves it.
        anneal_clip_range: Whether clip ranges go with it, as in rl-baselines3-zoo; in CleanRL they stay.
        seed: Of the order of minibatches.
    """

    batch_size: int = 1024
    epochs: int = 8
    minibatch_size: int = 256
    learning_rate: float = 5e-4
    clip_range: float = 0.2
    clip_range_high: float | None = None
    ratio_level: RatioLevel = "decision"
    objective: Objective = "decoupled"
    behaviour_weight: BeyondCap = "clamp"
    behaviour_weight_cap: float = 2.0
    dual_clip: float | None = None
    m2_threshold: float | None = None
    proximal: Proximal = "start"
    proximal_decay: float = 0.889
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    anneal_updates: int | None = None
    anneal_clip_range: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value that cannot work.
        """
        check_types(self)
        size, clip_high, dual_clip, m2 = self.minibatch_size, self.clip_range_high, self.dual_clip, self.m2_threshold
        decoupled = self.objective == "decoupled"
        check(
            self,
            ("batch_size", self.batch_size >= 1, "at least 1"),
            (
                "minibatch_size",
                size >= 1 and self.batch_size % size == 0,
                f"at least 1 and a divisor of batch_size={self.batch_size}",
            ),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("clip_range", self.clip_range > 0, "above 0"),
            ("clip_range_high", clip_high is None or clip_high > 0, "None or above 0"),
            one_of("ratio_level", self.ratio_level, RatioLevel),
            one_of("objective", self.objective, Objective),
            one_of("behaviour_weight", self.behaviour_weight, BeyondCap),
            ("behaviour_weight", decoupled or self.behaviour_weight == "clamp", _ONLY.format("clamp")),
            ("behaviour_weight_cap", self.behaviour_weight_cap >= 1, "at least 1"),
            ("dual_clip", dual_clip is None or dual_clip > 1, "None or above 1"),
            ("m2_threshold", m2 is None or m2 > 0, "None or above 0"),
            one_of("proximal", self.proximal, Proximal),
            ("proximal", decoupled or self.proximal == "start", _ONLY.format("start")),
            ("proximal_decay", 0 <= self.proximal_decay < 1, "at least 0 and below 1"),
            ("entropy_coef", self.entropy_coef >= 0, "at least 0"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            ("adam_eps", self.adam_eps > 0, "above 0"),
            ("anneal_updates", self.anneal_updates is None or self.anneal_updates >= 1, "None or at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        )


def check_learner(learner: object) -> None:
    """Check that something can be trained with.

    Raises:
        ConfigError: It is no `Learner`.
    """
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"learner must have update(batch), batch_size and policy, as ebrl.PPO(policy, config) has: "
            f"this is a {type(learner).__name__}"
        )
    whole(f"{type(learner).__name__}.batch_size", learner.batch_size)


KINDS: Final[dict[str, tuple[type, str]]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
}


def check_types(config: Any) -> None:
    """Check that options are of the types that their dataclass says, as far as numbers and flags go.

    Raises:
        ConfigError: One is not.
    """
    for each in fields(config):
        kind, *others = str(each.type).split(" | ")
        value = getattr(config, each.name)
        if kind not in KINDS or (value is None and "None" in others):
            continue
        form, words = KINDS[kind]
        if not (isinstance(value, bool) if form is bool else is_a(form, value)):
            raise ConfigError(f"{type(config).__name__}.{each.name}={value!r}: must be {words}")


_ONLY = "{!r} unless objective is 'decoupled'"
Rule: TypeAlias = tuple[str, bool, str]


def check(config: object, *rules: Rule) -> None:
    """Check options.

    Args:
        config: Has them.
        rules: Of each the name of an option, whether it is fine, and what it must be. Floats must also be finite.

    Raises:
        ConfigError: An option is not fine.
    """
    for name, fine, rule in rules:
        value = getattr(config, name)
        if not fine or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{type(config).__name__}.{name}={value!r}: must be {rule}")


def one_of(name: str, value: str, choices: Any) -> Rule:
    """Return the rule of an option that is one of a ``Literal``."""
    return name, value in get_args(choices), f"one of {get_args(choices)}"
