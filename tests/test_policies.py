"""Policies keep their contract, and `check_policy` notices those that do not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ebrl.core.errors import ConfigError, PolicyError, SpaceError
from ebrl.core.protocols import MEMORY, PolicyOut
from ebrl.core.records import ArraySpec, EnvSpec, Observation
from ebrl.gen.check import check_policy, example_observations
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.policies import CategoricalPolicy, GaussianPolicy, RecurrentPolicy, default_policy
from ebrl.gen.policies.base import TorchPolicy, mlp
from ebrl.gen.policies.normalizer import ObservationNormalizer

torch.set_num_threads(1)

VECTOR = ArraySpec((5,), "float64")
IMAGE = ArraySpec((8, 6, 3), "uint8")
BOX = ArraySpec((3,), "float32", np.array(-1, np.float32), np.array([1, 2, np.inf], np.float32))
CHOICE = ArraySpec((), "int64", num_values=4)


def make_spec(action: ArraySpec = BOX, observation: ArraySpec | Mapping[str, ArraySpec] = VECTOR) -> EnvSpec:
    return EnvSpec("Toy-v0", lambda: None, observation, action)


def some_batch(policy: TorchPolicy, spec: EnvSpec, num: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.standard_normal((num, policy.noise_dim), np.float32))
    return policy.collate(example_observations(spec, num, rng)), noise


OBSERVATIONS: dict[str, ArraySpec | Mapping[str, ArraySpec]] = {
    "plain": VECTOR,
    "named": {"arm": ArraySpec((4,), "float32"), "goal": ArraySpec((2,), "float64")},
}


@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_stock_policies_pass_the_check(observation: ArraySpec | Mapping[str, ArraySpec], normalize: bool) -> None:
    box, choice = make_spec(BOX, observation), make_spec(CHOICE, observation)
    check_policy(GaussianPolicy.for_spec(box, normalize=normalize), box)
    check_policy(GaussianPolicy.for_spec(box, normalize=normalize, horizon=4), box)
    check_policy(CategoricalPolicy.for_spec(choice, normalize=normalize), choice)
    check_policy(RecurrentPolicy.for_spec(box, memory_size=7, horizon=4, normalize=normalize), box)
    check_policy(RecurrentPolicy.for_spec(choice, memory_size=7, hidden=(), normalize=normalize), choice)


@pytest.mark.parametrize("action", [BOX, CHOICE, ArraySpec((2, 2), "float64")], ids=["box", "choice", "matrix"])
@pytest.mark.parametrize(
    "observation", [VECTOR, IMAGE, {"image": IMAGE, "arm": VECTOR}], ids=["vector", "image", "both"]
)
def test_the_fake_passes_the_check(action: ArraySpec, observation: ArraySpec | Mapping[str, ArraySpec]) -> None:
    spec = make_spec(action, observation)
    check_policy(ScriptedPolicy(spec), spec)
    check_policy(ScriptedPolicy(spec, horizon=3), spec)


def test_the_check_leaves_the_policy_alone() -> None:
    policy = GaussianPolicy.for_spec(make_spec())
    before = copy.deepcopy(policy.state_dict())
    check_policy(policy, make_spec())
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert all(p.grad is None for p in policy.parameters())


def test_same_seed_same_weights_and_the_global_generator_untouched() -> None:
    state = torch.get_rng_state()
    for make in (GaussianPolicy.for_spec, RecurrentPolicy.for_spec):
        a, b, c = (make(make_spec(), seed=seed) for seed in (1, 1, 2))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
        weights = [(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True) if x.ndim == 2 and x.numel() > 6]
        assert not any(torch.equal(x, y) for x, y in weights)


def test_mlp_is_orthogonal() -> None:
    net = mlp(8, 3, hidden=(8,), gain=0.01, generator=torch.Generator().manual_seed(0))
    first, last = net[0].weight, net[-1].weight
    torch.testing.assert_close(first @ first.T, 2 * torch.eye(8))  # type: ignore[operator]
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(3))  # type: ignore[operator]
    assert [type(layer) for layer in net] == [nn.Linear, nn.Tanh, nn.Linear]


def test_gaussian_matches_the_textbook() -> None:
    spec = make_spec()
    policy = GaussianPolicy.for_spec(spec, horizon=2, log_std=0.3)
    batch, noise = some_batch(policy, spec)
    out = policy.act(batch, 3 * noise)
    mode = policy.act(batch, noise, deterministic=True)
    normal = torch.distributions.Normal(mode.aux["u"], float(np.exp(0.3)))
    torch.testing.assert_close(out.log_prob, normal.log_prob(out.aux["u"]))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(policy.evaluate(batch, out.aux)[2], normal.entropy())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(out.aux["u"], mode.aux["u"] + float(np.exp(0.3)) * 3 * noise.view(-1, 2, 3))
    assert out.action[..., 0].min() == -1
    assert out.action[..., 0].max() == 1
    assert out.action[..., 2].max() == out.aux["u"][..., 2].max() > 2


def test_categorical_samples_its_distribution() -> None:
    spec = make_spec(CHOICE)
    policy = CategoricalPolicy.for_spec(spec)
    with torch.no_grad():
        policy.logits[-1].bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))  # type: ignore[operator]
    num = 20_000
    batch = {"state": torch.ones(1, 5).expand(num, 5)}
    out = policy.act(batch, torch.randn(num, 1, generator=torch.Generator().manual_seed(0)))
    share = out.action.flatten().bincount(minlength=4) / num
    probability = policy.logits(policy.features({"state": torch.ones(1, 5)})).softmax(-1)[0]
    torch.testing.assert_close(share, probability, rtol=0, atol=0.02)
    assert policy.act(batch, torch.zeros(num, 1), deterministic=True).action[0].item() == 1


@pytest.mark.parametrize("noise", [-40.0, 40.0])
def test_categorical_survives_the_tails_of_the_noise(noise: float) -> None:
    policy = CategoricalPolicy.for_spec(make_spec(CHOICE))
    out = policy.act({"state": torch.ones(1, 5)}, torch.tensor([[noise]]))
    assert out.action.item() == (0 if noise < 0 else 3)


def test_collate_keeps_images_and_narrows_floats() -> None:
    spec = make_spec(observation={"image": IMAGE, "arm": VECTOR, "gripper": ArraySpec((), "float64")})
    batch, _ = some_batch(ScriptedPolicy(spec), spec)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in batch.items()} == {
        "image": (torch.uint8, (6, 8, 6, 3)),
        "arm": (torch.float32, (6, 5)),
        "gripper": (torch.float32, (6,)),
    }


def test_normalizer_matches_one_pass_over_everything() -> None:
    normalizer = ObservationNormalizer(3)
    x = 1e3 + 5 * torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalizer(x / 1e3), x / 1e3)
    for part in x.split([1, 99, 900]):  # type: ignore[no-untyped-call]
        normalizer.update(part)
    torch.testing.assert_close(normalizer.mean, x.double().mean(0))
    torch.testing.assert_close(normalizer.var, x.double().var(0, correction=0))
    assert normalizer.count == 1000
    assert normalizer(x).dtype == torch.float32
    assert normalizer(x + 1e6).max() == 10


def test_the_normalizer_is_part_of_the_version() -> None:
    spec = make_spec()
    learner = GaussianPolicy.for_spec(spec)
    actor = copy.deepcopy(learner)
    batch, noise = some_batch(learner, spec)
    learner.observe(batch)
    assert "features.normalizer.count" in learner.state_dict()
    assert not torch.equal(learner.act(batch, noise).action, actor.act(batch, noise).action)
    actor.load_state_dict(learner.state_dict())
    assert torch.equal(learner.act(batch, noise).action, actor.act(batch, noise).action)


def test_default_policy() -> None:
    assert isinstance(default_policy(make_spec(BOX), horizon=2), GaussianPolicy)
    assert isinstance(default_policy(make_spec(CHOICE)), CategoricalPolicy)
    for spec, head in ((make_spec(BOX), GaussianPolicy), (make_spec(CHOICE), CategoricalPolicy)):
        policy = default_policy(spec, memory_size=5, hidden=(3,))
        assert isinstance(policy, RecurrentPolicy)
        assert isinstance(policy.head, head)
        assert policy.memory_size == 10, "5 of the actor, 5 of the critic"
    with pytest.raises(ConfigError, match=r"horizon=2: Toy-v0 has discrete actions"):
        default_policy(make_spec(CHOICE), horizon=2)
    with pytest.raises(ConfigError, match=r"horizon=2: Toy-v0 has discrete actions"):
        default_policy(make_spec(CHOICE), horizon=2, memory_size=5)
    with pytest.raises(ConfigError, match=r"memory_size must be a whole number of at least 1, got -1"):
        default_policy(make_spec(CHOICE), memory_size=-1)


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (GaussianPolicy.for_spec, make_spec(CHOICE), ["discrete with 4 values", "CategoricalPolicy.for_spec(spec)"]),
        (GaussianPolicy.for_spec, make_spec(ArraySpec((2,), "int64")), ["int64 of shape (2,)", "TorchPolicy"]),
        (CategoricalPolicy.for_spec, make_spec(BOX), ["float32 of shape (3,)", "GaussianPolicy.for_spec(spec)"]),
        (GaussianPolicy.for_spec, make_spec(observation=IMAGE), ["the observation has shape (8, 6, 3)", "TorchPolicy"]),
        (
            CategoricalPolicy.for_spec,
            make_spec(CHOICE, {"arm": VECTOR, "camera": IMAGE}),
            [
                "observation 'camera' has shape (8, 6, 3)",
                "without cameras",
                "TorchPolicy that sees (README.md, Pictures)",
            ],
        ),
        (
            GaussianPolicy.for_spec,
            make_spec(observation=ArraySpec((4, 4), "float32")),
            ["the observation has shape (4, 4)", "gymnasium.wrappers.FlattenObservation(environment)"],
        ),
    ],
)
def test_space_errors_name_the_way_out(make: Callable[[EnvSpec], Any], spec: EnvSpec, words: list[str]) -> None:
    with pytest.raises(SpaceError) as caught:
        make(spec)
    message = str(caught.value)
    assert message.startswith("Toy-v0: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_chunk_has_at_least_one_action() -> None:
    with pytest.raises(ConfigError, match="horizon must be a whole number of at least 1, got 0"):
        GaussianPolicy.for_spec(make_spec(), horizon=0)


class Good(TorchPolicy):
    """As small as a policy of one's own can be; the broken ones below change one thing each."""

    def __init__(self) -> None:
        super().__init__(horizon=2, noise_dim=6)
        self.weight = nn.Parameter(torch.full((5, 6), 0.1))
        self.critic = nn.Parameter(torch.full((5,), 0.1))

    def mean(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tanh(batch["state"] @ self.weight).view(-1, 2, 3)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        mean = self.mean(batch)
        u = mean if deterministic else mean + noise.view_as(mean)
        return PolicyOut(u.clamp(-1, 1), -0.5 * (u - mean) ** 2, batch["state"] @ self.critic, {"u": u})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mean(batch)
        return -0.5 * (aux["u"] - mean) ** 2, batch["state"] @ self.critic, torch.ones_like(mean)


def changes(**fields: Callable[[PolicyOut], Any]) -> type[Good]:
    """Make a policy whose `act` answers other fields."""

    class Changed(Good):
        def act(self, *args: Any, **options: Any) -> PolicyOut:
            out = super().act(*args, **options)
            for name, change in fields.items():
                setattr(out, name, change(out))
            return out

    return Changed


class NotPolicyOut(Good):
    def act(self, *args: Any, **options: Any) -> Any:
        return super().act(*args, **options).action


class BadCollate(Good):
    def collate(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        return {name: x[:-1] for name, x in super().collate(observations).items()}


class TensorCollate(Good):
    def collate(self, observations: Sequence[Observation]) -> Any:
        return super().collate(observations)["state"]


class NoHorizon(Good):
    def __init__(self) -> None:
        super().__init__()
        self.horizon = 0


class NegativeNoise(Good):
    def __init__(self) -> None:
        super().__init__()
        self.noise_dim = -1


class OtherScores(Good):
    """Takes a change of `evaluate`'s answer from the class."""

    change: Callable[..., Any] = staticmethod(lambda *scores: scores)

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> Any:
        return type(self).change(*super().evaluate(batch, aux))


def scores(change: Callable[..., Any]) -> type[Good]:
    return type("Scores", (OtherScores,), {"change": staticmethod(change)})


class GlobalNoise(Good):
    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        return super().act(batch, torch.randn_like(noise), deterministic)


class DropoutWhenScoring(Good):
    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        torch.rand(1)
        return super().evaluate(batch, aux)


class Remembers(Good):
    calls = 0

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        self.calls += 1
        return super().act(batch, noise + 0.1 * self.calls, deterministic)


class NoMode(Good):
    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        return super().act(batch, noise)


class BatchStatistics(Good):
    def mean(self, batch: dict[str, Tensor]) -> Tensor:
        mean = super().mean(batch)
        return mean - mean.mean(0)


class ByPosition(Good):
    def mean(self, batch: dict[str, Tensor]) -> Tensor:
        mean = super().mean(batch)
        return mean + torch.arange(len(mean)).view(-1, 1, 1)


class Unused(Good):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(1))


class NanGradient(Good):
    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        log_prob, value, entropy = super().evaluate(batch, aux)
        return log_prob, value + torch.sqrt(0 * self.critic).sum(), entropy


class Frozen(Good):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Locked(Good):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Forgetful(Good):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1), persistent=False)


class PrivateStatistics(Good):
    """Keeps what it observed in a number instead of a buffer."""

    offset = 0.0

    def mean(self, batch: dict[str, Tensor]) -> Tensor:
        return super().mean(batch) + self.offset

    def observe(self, batch: dict[str, Tensor]) -> None:
        self.offset += 1.0


class CopiesBadly(Good):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesBadly:
        new = CopiesBadly()
        new.weight.data = self.weight.data + 1
        return new


BROKEN: list[tuple[type[Good], str]] = [
    (BadCollate, r"collate\['state'\] must be a tensor with 5 rows, got torch.float32 \[4, 5\]"),
    (TensorCollate, "collate must be a dict of tensors, got Tensor"),
    (NoHorizon, "horizon is 0; a chunk has at least 1 action"),
    (NegativeNoise, "noise_dim is -1; it counts numbers"),
    (NotPolicyOut, "act must return a PolicyOut, got Tensor"),
    (changes(action=lambda out: out.action[:, 0]), r"action must be torch.float32 \[5, 2, 3\], got"),
    (changes(action=lambda out: out.action.double()), r"action must be torch.float32 \[5, 2, 3\], got torch.float64"),
    (changes(action=lambda out: out.action * torch.nan), "action has NaN or infinity"),
    (changes(action=lambda out: out.action - 9), "action leaves the bounds of Toy-v0; clip it"),
    (changes(log_prob=lambda out: out.log_prob.sum(-1)), r"log_prob of act must be torch.float32 \[5, 2, 3\]"),
    (changes(value=lambda out: out.value[:, None]), r"value of act must be torch.float32 \[5\], got"),
    (changes(aux=lambda out: {"u": out.aux["u"][0]}), r"aux\['u'\] must be a tensor with 5 rows"),
    (changes(value=lambda out: nn.Parameter(out.value)), "act returns a view of a parameter"),
    (GlobalNoise, "act uses torch's global generator"),
    (DropoutWhenScoring, "evaluate uses torch's global generator"),
    (Remembers, "act gives two results for the same noise"),
    (NoMode, r"act\(deterministic=True\) depends on the noise; take the mode"),
    (BatchStatistics, "rows depend on their company"),
    (ByPosition, "rows depend on their order"),
    (scores(lambda log_prob, value, entropy: (log_prob, value)), "evaluate must return .* got tuple of 2"),
    (scores(lambda log_prob, value, entropy: [log_prob, value, entropy]), "evaluate must return .* got list"),
    (scores(lambda log_prob, value, entropy: (log_prob, value, entropy.sum(-1))), "entropy of evaluate must be"),
    (
        scores(lambda log_prob, value, entropy: (log_prob + 0.1, value, entropy)),
        "log_prob differs from act's by .* 0.1",
    ),
    (scores(lambda log_prob, value, entropy: (log_prob, value + 1, entropy)), "evaluate's value differs from act's"),
    (scores(lambda *x: tuple(y.detach() for y in x)), "evaluate's outputs carry no gradient"),
    (Unused, "no gradient reaches 'spare'; freeze it"),
    (NanGradient, "the gradient of 'critic' has NaN or infinity"),
    (Frozen, "no parameter requires a gradient"),
    (Locked, "copy.deepcopy fails"),
    (Forgetful, "buffer 'scale' is not in state_dict"),
    (PrivateStatistics, "what observe learns is not in state_dict"),
]


def test_a_policy_of_ones_own_passes_the_check() -> None:
    check_policy(Good(), make_spec())


@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_the_check_names_the_violation(broken: type[Good], message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        check_policy(broken(), make_spec())
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(broken.__name__)


class Recurrent(Good):
    """The memory is a sum of what was seen that fades; what is seen for the policy is the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_size = 5

    def after(self, batch: dict[str, Tensor], memory: Tensor) -> Tensor:
        return torch.tanh(0.5 * memory + batch["state"])

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        memory = self.after(batch, batch[MEMORY])
        out = super().act({"state": memory}, noise, deterministic)
        out.memory = memory
        return out

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return super().evaluate({"state": self.after(batch, aux[MEMORY])}, aux)

    def unroll(self, batch: dict[str, Tensor], aux: dict[str, Tensor], lengths: Sequence[int]) -> Any:
        rows: list[Tensor] = []
        for length in lengths:
            memory = aux[MEMORY][len(rows) : len(rows) + 1]
            for row in range(len(rows), len(rows) + length):
                memory = self.after({"state": batch["state"][row : row + 1]}, memory)
                rows.append(memory)
        return super().evaluate({"state": torch.cat(rows)}, aux)


def remembers(change: Callable[[Tensor], Any]) -> type[Recurrent]:
    """Make a policy that gives back another memory."""

    class Changed(Recurrent):
        def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
            out = super().act(batch, noise, deterministic)
            assert out.memory is not None
            out.memory = change(out.memory)
            return out

    return Changed


class NegativeMemory(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.memory_size = -1


class NoMemorySize(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.memory_size = 0

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        return super().act({MEMORY: torch.zeros(len(noise), 5), **batch}, noise, deterministic)


class CollatesMemory(Recurrent):
    def collate(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        return {MEMORY: torch.zeros(len(observations), 5), **super().collate(observations)}


class WritesMemory(Recurrent):
    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        batch[MEMORY].add_(1.0)
        return out


class RemembersTheBatch(Recurrent):
    def after(self, batch: dict[str, Tensor], memory: Tensor) -> Tensor:
        return super().after(batch, memory + memory.mean(0))


class ScoresFromNothing(Recurrent):
    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return super().evaluate(batch, {**aux, MEMORY: 0 * aux[MEMORY]})


class NoUnroll(Recurrent):
    unroll = None  # type: ignore[assignment]


class UnrollsFromNothing(Recurrent):
    def unroll(self, batch: dict[str, Tensor], aux: dict[str, Tensor], lengths: Sequence[int]) -> Any:
        return super().unroll(batch, {**aux, MEMORY: 0 * aux[MEMORY]}, lengths)


class UnrollsAsOne(Recurrent):
    def unroll(self, batch: dict[str, Tensor], aux: dict[str, Tensor], lengths: Sequence[int]) -> Any:
        return super().unroll(batch, aux, [sum(lengths)])


BROKEN_MEMORY: list[tuple[type[Good], str]] = [
    (NegativeMemory, "memory_size is -1; it counts numbers"),
    (NoMemorySize, "act returns a memory, but memory_size is 0"),
    (CollatesMemory, "collate has an entry 'memory'; that is where the memory goes"),
    (WritesMemory, "act writes into the memory that it is given"),
    (RemembersTheBatch, "rows depend on their company"),
    (remembers(lambda memory: None), r"memory of act must be torch.float32 \[5, 5\], got NoneType"),
    (remembers(lambda memory: memory[:, :3]), r"memory of act must be torch.float32 \[5, 5\], got .* \[5, 3\]"),
    (remembers(lambda memory: memory * torch.nan), "memory of act has NaN or infinity"),
    (ScoresFromNothing, "evaluate's log_prob differs from act's"),
    (NoUnroll, "a policy with memory needs a method unroll"),
    (UnrollsFromNothing, "unroll's log_prob differs from act's"),
    (UnrollsAsOne, "unroll's log_prob differs from act's"),
]


def test_a_policy_with_memory_of_ones_own_passes_the_check() -> None:
    check_policy(Recurrent(), make_spec())


@pytest.mark.parametrize(("broken", "message"), BROKEN_MEMORY, ids=[message[:40] for _, message in BROKEN_MEMORY])
def test_the_check_names_what_is_wrong_with_a_memory(broken: type[Good], message: str) -> None:
    test_the_check_names_the_violation(broken, message)


def test_the_check_notices_a_bad_copy() -> None:
    with pytest.raises(PolicyError, match="a deepcopy acts differently"):
        check_policy(CopiesBadly(), make_spec())


def test_the_check_wants_a_module_and_two_rows() -> None:
    with pytest.raises(PolicyError, match=r"a policy is a torch.nn.Module, but this is a dict"):
        check_policy({}, make_spec())
    with pytest.raises(ConfigError, match="batch_size=1"):
        check_policy(Good(), make_spec(), batch_size=1)


def test_examples_have_the_declared_form() -> None:
    wide = ArraySpec((3,), "float32", np.full(3, -3.4e38, np.float32), np.array([5, 3.4e38, np.inf], np.float32))
    arrays = {"wide": wide, "image": IMAGE, "button": ArraySpec((2,), "bool"), "choice": CHOICE, "box": BOX}
    for obs in example_observations(make_spec(observation=arrays), 20, np.random.default_rng(0)):
        assert isinstance(obs, dict)
        assert {name: (x.shape, x.dtype.name) for name, x in obs.items()} == {
            name: (array.shape, array.dtype) for name, array in arrays.items()
        }
        assert np.abs(obs["wide"]).max() < 10
        assert obs["choice"] in range(4)
        assert (obs["box"] >= -1).all()
