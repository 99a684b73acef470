"""A recurrent network in front of any policy without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from ebrl.core.errors import whole
from ebrl.core.protocols import MEMORY, PolicyOut
from ebrl.core.records import ArraySpec, EnvSpec
from ebrl.gen.policies.base import STATE, Features, TorchPolicy, check_spec, source_of, vector_features
from ebrl.gen.policies.feed_forward import feed_forward_policy


class RecurrentPolicy(TorchPolicy):
    """Remembers what it saw in an episode in two gated recurrent units (Cho et al. 2014, arXiv:1406.1078).

    Both read the observation. The state of one is what actions come from, that of the other what values come from: with
    one unit for both, what the critic learns changes what the actor remembers. Their states side by side are the
    memory, and all that the `head` sees. So the head is any policy for the same actions whose observation is a vector
    of M numbers, and says what is sampled and how; its value is asked for what the critic remembers.

    Args:
        features: Reads the observation.
        head: A policy without memory that reads ``batch["state"]`` ``[B, M]``.
        memory_size: M, numbers that actor and critic remember each: the policy's own `memory_size` is twice that.
        seed: Of the weights of the units.
    """

    def __init__(self, features: Features, head: TorchPolicy, memory_size: int, *, seed: int = 0) -> None:
        super().__init__(horizon=head.horizon, noise_dim=head.noise_dim, memory_size=2 * memory_size)
        generator = source_of(seed)
        self.features = features
        self.head = head
        self.actor_unit = gated_unit(features.size, memory_size, generator)
        self.critic_unit = gated_unit(features.size, memory_size, generator)

    @classmethod
    def for_spec(
        cls,
        spec: EnvSpec,
        *,
        memory_size: int = 64,
        hidden: Sequence[int] = (64, 64),
        horizon: int = 1,
        normalize: bool = True,
        seed: int = 0,
    ) -> Self:
        """Make a policy that fits an environment: Gaussian for float actions, categorical for discrete ones.

        Args:
            spec: Its observations must be 1-D arrays.
            memory_size: M, numbers that actor and critic remember each.
            hidden: Widths of the hidden layers between memory and action, and memory and value.
            horizon: H, actions in one chunk; 1 for discrete actions.
            normalize: Scale observations by running statistics.
            seed: Of the weights: the same seed gives the same weights.

        Raises:
            SpaceError: It cannot serve these spaces.
            ConfigError: An argument that cannot be.
        """
        check_spec(spec, f"{cls.__name__}.for_spec")
        whole("memory_size", memory_size)
        features = vector_features(spec, cls.__name__, normalize=normalize)
        seen_by_head = replace(spec, observation=ArraySpec((memory_size,), "float32"))
        head = feed_forward_policy(seen_by_head, hidden=hidden, horizon=horizon, normalize=False, seed=seed)
        return cls(features, head, memory_size, seed=seed)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions; see `ebrl.core.protocols.Policy.act`. `aux` is that of the head."""
        actor, critic = self._remember(batch, batch[MEMORY])
        value = self.head.act({STATE: critic}, noise, deterministic).value
        chosen = self.head.act({STATE: actor}, noise, deterministic)
        return replace(chosen, value=value, memory=torch.cat([actor, critic], -1))

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again, with the memory that was stored; see `ebrl.core.protocols.Policy.evaluate`."""
        actor, critic = self._remember(batch, aux[MEMORY])
        return self._score(actor, critic, aux)

    def unroll(
        self, batch: dict[str, Tensor], aux: dict[str, Tensor], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score sequences again; see `ebrl.core.protocols.MemoryPolicy.unroll`."""
        first = [0, *accumulate(lengths)][:-1]
        seen = pack_sequence(self.features(batch).split(list(lengths)), enforce_sorted=False)
        actor, critic = (
            torch.cat(unpack_sequence(unit(seen, before.unsqueeze(0))[0]))
            for unit, before in self._units(aux[MEMORY][first])
        )
        return self._score(actor, critic, aux)

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take trained observations into the running statistics."""
        self.features.observe(batch)

    def _units(self, memory: Tensor) -> Iterator[tuple[nn.GRU, Tensor]]:
        """Yield the actor's unit and the critic's, each with its part ``[B, M]`` of a memory."""
        actor, critic = memory.chunk(2, -1)
        yield self.actor_unit, actor.contiguous()
        yield self.critic_unit, critic.contiguous()

    def _remember(self, batch: dict[str, Tensor], memory: Tensor) -> list[Tensor]:
        """Return what actor and critic remember ``[B, M]`` after one more observation."""
        seen = self.features(batch).unsqueeze(0)
        return [unit(seen, before.unsqueeze(0))[1].squeeze(0) for unit, before in self._units(memory)]

    def _score(self, actor: Tensor, critic: Tensor, aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `evaluate` does, from what actor and critic remember ``[B, M]``."""
        log_prob, _, entropy = self.head.evaluate({STATE: actor}, aux)
        _, value, _ = self.head.evaluate({STATE: critic}, aux)
        return log_prob, value, entropy


def gated_unit(num_in: int, num_out: int, generator: torch.Generator) -> nn.GRU:
    """Make a gated recurrent unit with orthogonal weights and zero biases.

    Args:
        num_in: Numbers in.
        num_out: M, numbers that it remembers.
        generator: Source of the weights.
    """
    # Made on no device: the constructor's own initialisation would draw from the global generator.
    unit = nn.GRU(num_in, num_out, device="meta").to_empty(device="cpu")
    for name, weights in unit.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(weights, generator=generator)
        else:
            nn.init.zeros_(weights)
    return unit
