"""Stock programs: short, and meant to be copied into your own code and changed."""

from __future__ import annotations

from ebrl.sim.context import EnvContext
from ebrl.sim.vector_context import VectorContext


async def rollout(env: EnvContext) -> None:
    """One episode: the policy decides, the simulator executes the whole chunk."""
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.act_step(obs)).obs


async def receding_horizon(env: EnvContext, execute: int = 1) -> None:
    """One episode in which only the first `execute` actions of every chunk are executed.

    Use as ``program=functools.partial(receding_horizon, execute=4)``.

    Args:
        env: The environment.
        execute: Actions per decision.
    """
    obs, _ = await env.reset()
    while not env.done:
        out = await env.act(obs)
        obs = (await env.step(out.action[:execute])).obs


async def vector_rollout(env: VectorContext) -> None:
    """Episodes of a batched simulator, for ever: the policy decides for all slots, and those that end are reset."""
    obs, _ = await env.reset()
    while True:
        out = await env.act(obs)
        obs = (await env.step(out.action)).obs
        ended = env.needs_reset
        if ended.any():
            obs, _ = await env.reset(ended)
