"""`env_spec`: how to make a simulator, and what it looks like from outside."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from ebrl.core.errors import ConfigError, SpaceError, UnknownEnv
from ebrl.core.records import Array, ArraySpec, EnvSpec, Host
from ebrl.sim import adapters
from ebrl.sim.adapters import Wanted, has_adapter
from ebrl.sim.awaited import Apart, AwaitedSimulator, answer, check_awaited, is_awaited, not_awaited
from ebrl.sim.border import SUCCESS
from ebrl.sim.simulator import Simulator, construction_lock
from ebrl.sim.vector_simulator import SLOT_SEEDS, VectorSimulator, accept

Form: TypeAlias = "ArraySpec | Mapping[str, ArraySpec]"
Factory: TypeAlias = Callable[..., Any]
"""Returns a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv``, or an environment that is awaited."""


def env_spec(
    env: str | Factory,
    /,
    *,
    horizon: int | None = None,
    action_repeat: int = 1,
    task: str = "",
    host: Host | None = None,
    memory_mib: int = 0,
    num_slots: int = 0,
    **kwargs: Any,
) -> EnvSpec:
    """Describe an environment; builds one, plays one step, and closes it.

    Example:
        >>> spec = env_spec("CartPole-v1", horizon=200)
        >>> spec.observation.shape, spec.action.num_values, spec.horizon
        ((4,), 2, 200)

    Args:
        env: Id that gymnasium knows (``"module:Env-v0"`` imports the module first), or for an adapter of
            `ebrl.sim.envs` (``"Meta-World/MT1"``, ``"LIBERO/libero_spatial"``, ``"ManiSkill/PickCube-v1"``,
            ``"robosuite/Lift"``, ``"EnvPool/HalfCheetah-v5"``), or a function that returns a ``gymnasium.Env``; or one
            whose `reset` and `step` are coroutine functions, and then `close` and the function itself may be, too.
        horizon: Simulator steps after which an episode is truncated, in addition to what the environment does itself.
        action_repeat: Simulator steps for which each action is applied.
        task: What a policy is asked to do.
        host: Where it runs: ``"thread"``, ``"process"``, ``"inline"``, which is on the loop and for those that are
            awaited, or ``"auto"``, where it is found to run better when a group starts. None: what its adapter says;
            without one in a thread, or on the loop where it is awaited.
        memory_mib: That one simulator takes; a group is not built where its simulators do not fit. 0: what its
            adapter knows.
        num_slots: M; describes a batched simulator, for `VectorGroup`: the adapter's own (EnvPool, ManiSkill on a GPU),
            or else M environments that are stepped in turn. A function that makes a ``gymnasium.vector.VectorEnv`` says
            so itself. 0: one environment, for `EnvGroup`.
        **kwargs: For the environment.

    Raises:
        UnknownEnv: No such id; lists the nearest.
        SpaceError: Spaces that EBRL does not serve; names a wrapper that helps.
        ConfigError: Options out of range, or a package is missing.
        InvalidData: The environment contradicts its own spaces.
    """
    check_options(horizon, action_repeat, host, memory_mib, num_slots)
    if isinstance(env, str) and has_adapter(env):
        (spec,) = _adapted(Wanted(env, kwargs, horizon, action_repeat, task, host, num_slots), only=True)
    else:
        spec = probe(batched(_describe(env, horizon, action_repeat, task, host, kwargs), num_slots))
    check_awaited(spec, host)
    return replace(spec, memory_mib=memory_mib or spec.memory_mib)


def env_specs(
    env: str | Factory,
    /,
    *,
    horizon: int | None = None,
    action_repeat: int = 1,
    host: Host | None = None,
    memory_mib: int = 0,
    num_slots: int = 0,
    **kwargs: Any,
) -> tuple[EnvSpec, ...]:
    """Describe all tasks of a benchmark, for `EnvGroup`; of anything else, the one environment that it is.

    Example:
        >>> [spec.id for spec in env_specs("CartPole-v1")]
        ['CartPole-v1']

    Args:
        env: ``"Meta-World/MT10"`` or ``"Meta-World/MT50"``, whose policy is told the task by a one-hot vector at the
            end of its state (49 numbers, or 89); ``"LIBERO/libero_spatial"`` or another suite; or what `env_spec`
            takes.
        horizon: As for `env_spec`.
        action_repeat: As for `env_spec`.
        host: As for `env_spec`.
        memory_mib: As for `env_spec`, of each simulator.
        num_slots: As for `env_spec`.
        **kwargs: For the environments.

    Raises:
        EbrlError: As `env_spec`.
    """
    if not isinstance(env, str) or not has_adapter(env):
        options: dict[str, Any] = {
            "horizon": horizon,
            "action_repeat": action_repeat,
            "host": host,
            "num_slots": num_slots,
        }
        return (env_spec(env, memory_mib=memory_mib, **options, **kwargs),)
    check_options(horizon, action_repeat, host, memory_mib, num_slots)
    specs = _adapted(Wanted(env, kwargs, horizon, action_repeat, host=host, num_slots=num_slots))
    return tuple(replace(spec, memory_mib=memory_mib or spec.memory_mib) for spec in specs)


def _adapted(wanted: Wanted, only: bool = False) -> tuple[EnvSpec, ...]:
    specs = tuple(batched(spec, wanted.num_slots) for spec in adapters.describe(wanted))
    if only and len(specs) > 1:
        raise ConfigError(f'{wanted.name} has {len(specs)} tasks: env_specs("{wanted.name}") describes all of them')
    try:
        first = probe(specs[0])  # the tasks of a benchmark have one form
    except TypeError as error:
        raise ConfigError(f"{wanted.name} does not take {wanted.kwargs}: {str(error).splitlines()[0]}") from error
    found = {name: getattr(first, name) for name in ("observation", "action", "info_keys", "num_slots", "slot_seeds")}
    return tuple(replace(spec, **found) for spec in specs)


def _describe(
    env: str | Factory, horizon: int | None, action_repeat: int, task: str, host: Host | None, kwargs: dict[str, Any]
) -> EnvSpec:
    if isinstance(env, str):
        make: Callable[[], Any] = functools.partial(make_by_id, env, kwargs)
        name = env
    elif callable(env):
        make, name = functools.partial(env, **kwargs) if kwargs else env, _name_of(env)
    else:
        raise ConfigError(
            f"env_spec takes an id or a function that makes an environment, got {type(env).__name__}: "
            "write env_spec(lambda: MyEnv(...))"
        )
    blank = ArraySpec((), "float32")
    return EnvSpec(name, make, blank, blank, horizon, action_repeat, task, host or "thread")


def batched(spec: EnvSpec, num_slots: int) -> EnvSpec:
    """Return the description of a batched simulator of environments that are stepped in turn; as it is for 0 slots."""
    if not num_slots or spec.num_slots:
        return spec
    return replace(spec, make=functools.partial(in_turn, spec.make, num_slots), num_slots=num_slots)


def in_turn(make: Callable[[], Any], num_slots: int) -> VectorEnv[Any, Any, Any]:
    """Make environments that are stepped in turn, as one batched simulator; what is one already stays as it is."""
    first = make()
    if isinstance(first, VectorEnv):
        return first
    if inspect.iscoroutine(first):
        first.close()  # nobody awaits it
    if is_awaited(first) or inspect.isawaitable(first):
        raise ConfigError("environments that are awaited are not stepped in turn: leave out num_slots")
    makes = [lambda: first, *[make] * (num_slots - 1)]
    return SyncVectorEnv(makes, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def probe(spec: EnvSpec) -> EnvSpec:
    """Fill in what only an instance can tell: spaces, numeric info keys, and what there is to know of slots.

    Args:
        spec: Without them.

    Raises:
        SpaceError: Spaces that EBRL does not serve.
        InvalidData: The environment contradicts its own spaces.
    """
    with construction_lock:
        env = spec.make()
    if isinstance(env, VectorEnv):
        return _probe_batched(spec, env)
    if is_awaited(env) or inspect.isawaitable(env):
        return _probe_awaited(spec, env)
    if spec.host == "inline":
        raise not_awaited(spec.id)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{spec.id}: expected the function to make a gymnasium.Env, got {type(env).__name__}")
    try:
        observed = observation_spec(env.observation_space, spec.id)
        spec = replace(spec, observation=observed, action=action_spec(env.action_space, spec.id))
        simulator = Simulator(replace(spec, make=lambda: env, action_repeat=1))
        infos = [simulator.reset(0)[1], simulator.step(neutral_action(spec.action)).info]
    finally:
        env.close()
    return replace(spec, info_keys=_numeric_keys(infos))


def _probe_awaited(spec: EnvSpec, made: Any) -> EnvSpec:
    async def play() -> EnvSpec:
        env = await answer(lambda: made)  # on the loop that it is then used on
        if not is_awaited(env):
            raise ConfigError(
                f"{spec.id}: a coroutine function makes environments whose reset and step are coroutine functions, "
                f"this one made {type(env).__name__}: make it with a plain function"
            )
        try:
            observed = observation_spec(env.observation_space, spec.id)
            found = replace(spec, observation=observed, action=action_spec(env.action_space, spec.id), host="inline")
            simulator = AwaitedSimulator(replace(found, action_repeat=1), env)
            infos = [(await simulator.reset(0))[1], (await simulator.step(neutral_action(found.action))).info]
        finally:
            await answer(env.close)
        return replace(found, info_keys=_numeric_keys(infos))

    with Apart() as apart:
        return apart.run(play())


def _numeric_keys(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    keys = dict.fromkeys(SUCCESS)  # often there only at the end of an episode, which the probe does not see
    keys |= {key: None for info in infos for key, value in info.items() if is_numeric(key, value)}
    return tuple(keys)


def _probe_batched(spec: EnvSpec, env: VectorEnv[Any, Any, Any]) -> EnvSpec:
    try:
        num = accept(env, spec.id)
        if num != (spec.num_slots or num):
            raise ConfigError(
                f"{spec.id}: num_slots={spec.num_slots}, but the function makes {num} slots: leave it out"
            )
        spec = replace(
            spec,
            observation=observation_spec(env.single_observation_space, spec.id),
            action=action_spec(env.single_action_space, spec.id),
            num_slots=num,
            slot_seeds=bool(env.metadata.get(SLOT_SEEDS, True)),
        )
        simulator = VectorSimulator(replace(spec, make=lambda: env, action_repeat=1))
        try:
            simulator.reset(dict.fromkeys(range(num), 0))
        except (TypeError, ValueError, gymnasium.error.Error) as error:
            raise ConfigError(
                f"{spec.id}: reset(seed=...) failed ({error}): a batched simulator takes a list of seeds, one per "
                f"slot, or says metadata[{SLOT_SEEDS!r}] = False and takes one number"
            ) from error
        simulator.step(np.stack([neutral_action(spec.action)] * num))
    finally:
        env.close()
    return spec


def observation_spec(space: Any, name: str) -> Form:
    """Return the form of an observation space: a Box, or a flat Dict of Boxes.

    Raises:
        SpaceError: Anything else.
    """
    if isinstance(space, spaces.Box):
        return _box(space)
    if isinstance(space, spaces.Dict):
        parts: dict[str, ArraySpec] = {}
        for key, part in space.spaces.items():
            if not isinstance(part, spaces.Box):
                raise SpaceError(
                    f"{name}: observation[{key!r}] is a {type(part).__name__}, expected a Box: "
                    "wrap the environment in gymnasium.wrappers.FlattenObservation"
                )
            parts[key] = _box(part)
        return parts
    raise SpaceError(
        f"{name}: observations are a {type(space).__name__}, expected a Box or a flat Dict of Boxes: "
        "wrap the environment in gymnasium.wrappers.FlattenObservation"
    )


def action_spec(space: Any, name: str) -> ArraySpec:
    """Return the form of an action space: a Box of floats, or a Discrete that starts at 0.

    Raises:
        SpaceError: Anything else.
    """
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return _box(space)
    if isinstance(space, spaces.Discrete):
        if space.start == 0:
            return ArraySpec((), "int64", num_values=int(space.n))
        raise SpaceError(
            f"{name}: discrete actions start at {space.start}, expected 0: wrap the environment in gymnasium.wrappers."
            f"TransformAction(env, lambda a: a + {space.start}, gymnasium.spaces.Discrete({space.n}))"
        )
    raise SpaceError(
        f"{name}: actions are {space}, expected a Box of floats or a Discrete: wrap the environment in "
        "gymnasium.wrappers.TransformAction"
    )


def neutral_action(spec: ArraySpec) -> Array:
    """Return the legal action nearest to zero."""
    zero: Array = np.zeros(spec.shape, spec.dtype)
    if spec.low is not None or spec.high is not None:
        zero = np.clip(zero, spec.low, spec.high).astype(spec.dtype)
    return zero


def is_numeric(key: Any, value: Any) -> bool:
    """Whether an entry of ``info`` is a named number."""
    return isinstance(key, str) and isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


def make_by_id(name: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make an environment that gymnasium knows; a module-level function, so that it can be sent to a process.

    Raises:
        UnknownEnv: gymnasium does not know it.
        ConfigError: A package is missing, or the environment does not take `kwargs`.
    """
    module, colon, rest = name.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{name}: module {error.name!r} is not installed, or not on the path") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {module!r} is no name of a module: write module:Env-v0") from error
    try:
        return gymnasium.make(rest, **{"disable_env_checker": True, **kwargs})
    except gymnasium.error.UnregisteredEnv as error:
        known = {key: key for key in gymnasium.registry} | _metaworld_names()
        unknown_env(rest, known, ' (your own: env_spec("module:Id-v0"), or a function that makes it)', error)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{name}: {error}") from error
    except gymnasium.error.Error as error:
        raise UnknownEnv(f"no environment {name!r}: {str(error).splitlines()[0]}") from error
    except TypeError as error:
        if not kwargs:
            raise
        raise ConfigError(f"{name} does not take {dict(kwargs)}: {str(error).splitlines()[0]}") from error


def unknown_env(name: str, known: Mapping[str, str], hint: str = "", cause: BaseException | None = None) -> NoReturn:
    """Raise with the nearest names.

    Args:
        name: What was asked for.
        known: Names to compare with, and how to ask for each.
        hint: Ends the message.
        cause: Of the error.

    Raises:
        UnknownEnv: Always.
    """
    name = str(name)
    lower = {candidate.lower(): shown for candidate, shown in known.items()}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=5, cutoff=0.0)]
    raise UnknownEnv(f"no environment {name!r}; nearest: {', '.join(near)}{hint}") from cause


def check_options(horizon: Any, action_repeat: Any, host: Any, memory_mib: int, num_slots: int = 0) -> None:
    """Check what does not depend on the environment.

    Raises:
        ConfigError: Out of range.
    """
    for option, value in (("horizon", horizon), ("action_repeat", action_repeat)):
        if option == "horizon" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{option} must be an integer of at least 1, got {value!r}")
    if host not in {None, *get_args(Host)}:
        raise ConfigError(f"host must be one of {get_args(Host)} or None, got {host!r}")
    if memory_mib < 0:
        raise ConfigError(f"memory_mib must be at least 0, got {memory_mib}")
    if num_slots < 0:
        raise ConfigError(f"num_slots must be at least 1 for a batched simulator, got {num_slots}")
    if num_slots and host not in {None, "thread"}:
        raise ConfigError(f"a batched simulator runs in a thread of this process: leave out host={host!r}")


def _metaworld_names() -> dict[str, str]:
    if importlib.util.find_spec("metaworld") is None:
        return {}
    names: dict[str, str] = importlib.import_module("ebrl.sim.envs.metaworld").names()
    return names


def _name_of(factory: Any) -> str:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))


def _box(space: spaces.Box) -> ArraySpec:
    if space.dtype == np.uint8:  # pictures: a number for each of theirs says nothing
        return ArraySpec(tuple(space.shape), "uint8")
    low = space.low if np.isfinite(space.low).any() else None
    high = space.high if np.isfinite(space.high).any() else None
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype).name, low, high)
