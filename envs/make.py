"""`make_group` and `make_single` make environments by the flags; names are resolved here and nowhere else."""

import functools
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

from appo.envs import families, given
from appo.envs.agents import pettingzoo
from appo.envs.agents.multi_agent import loop_over
from appo.envs.config import EnvConfig
from appo.envs.conversion import one_line, reraise
from appo.envs.families import envpool
from appo.envs.family import Adapter, Family, VectorAdapter
from appo.envs.loop.env_set import RAISE, EnvSet, OnFailure, SingleEnv
from appo.envs.names import registered_with_gym, suggestion
from appo.envs.precision import may_lose, watched
from appo.envs.spaces import ActionForm, find_out_agents, note_frames, num_agents_of
from appo.envs.spec import EnvSpec, GroupEnv
from appo.envs.toys.toy import register_toys
from appo.envs.vectors.gym_vector import AnyVectorEnv, GymVector, random_steps
from appo.envs.wrappers.flags import as_flags_ask, vector_as_flags_ask
from appo.envs.wrappers.making import RepeatAction, know_actions_sooner, make_registered, stack_frames
from appo.envs.wrappers.masks_of_method import with_masks_of_method, with_masks_of_methods
from appo.utils.errors import CannotBeDrawn, EnvironmentFailure, OtherNumber, SpaceMismatch, UsageError
from appo.utils.tracebacks import comes_from_own_code
from appo.utils.user_modules import import_user_module
from appo.utils.values import nearest, printable

Factory = Callable[..., Any]

FAMILIES: dict[Family, Adapter | None] = {
    module.FAMILY: module if isinstance(module, Adapter) else None for module in families.modules().values()
}
"""All families, with the module if the module makes the environments."""

CONSTRUCTOR_FLAGS = {
    "env_frameskip": ("frameskip", "frame_skip"),
    "env_framestack": ("stack_num", "frame_stack", "framestack"),
    "horizon": ("max_episode_steps",),
}
"""Flag -> names of the constructor argument that takes the flag's value."""

PRECISION_STEPS, PRECISION_SECONDS = 32, 1.0
NEVER = 10**9  # steps of an episode, which fit into the 32 bits of native vectors


class MadeVector(UsageError):
    """A function made a vector of environments where one environment is needed."""


def check_name(config: EnvConfig) -> None:
    """Find the environment without constructing it.

    Raises:
        UsageError: the module, attribute or id does not exist (with the nearest ids), or the package is not installed.
    """
    _resolve(config.env)


def make_group(
    config: EnvConfig,
    num_envs: int,
    *,
    seed: int | Sequence[int] = 0,
    decorrelate_steps: int = 0,
    render_mode: str | None = None,
    spec: EnvSpec | None = None,
    on_failure: OnFailure = RAISE,
) -> GroupEnv:
    """Make the environments of one group: our own loop, or the environment's native vector.

    `seed` decides only the random walks of `decorrelate_steps` (in [0, decorrelate_steps) per env, Python loop only);
    `reset` seeds the environments. A render mode is for the Python loop only; a vector that fails is never made again.
    A known `spec` saves the reset that looks for masks.

    Raises:
        UsageError: the environment cannot be found, made or used as asked.
        EnvironmentFailure: code of the environment raised.
    """
    target = _target_of(config)
    for family in FAMILIES:
        for flag in family.flags:
            if getattr(config, flag) is not None and not family.has_id(config.env.rpartition(":")[2]):
                raise UsageError(f"--{flag}={getattr(config, flag)} is for {family.name} only, not for {config.env}")
    if _is_native(config, target):
        return _native_group(config, target, num_envs, spec, on_failure)
    try:
        group = loop_over(
            [lambda: make_single(config, render_mode)] * num_envs,
            name=config.env,
            seed=seed,
            decorrelate_steps=decorrelate_steps if config.decorrelate_envs_on_one_worker else 0,
            spec=spec,
            form=ActionForm.of(config),
            on_failure=on_failure,
        )
    except MadeVector:  # a function says what it makes by making it
        _require_able(config, target)
        return _native_group(config, target, num_envs, spec, on_failure)
    return counting_frames(group, config)


def _native_group(
    config: EnvConfig, target: Registration | Factory, num_envs: int, spec: EnvSpec | None, on_failure: OnFailure
) -> GroupEnv:
    make = functools.partial(_make_vector, config, target, num_envs)
    group = GymVector(make, name=config.env, spec=spec, form=ActionForm.of(config), on_failure=on_failure)
    return counting_frames(group, config)


def counting_frames(group: GroupEnv, config: EnvConfig) -> GroupEnv:
    """Let a step count as the frames of `--env_frameskip`, if the constructor skips them and nothing else counts."""
    target = _resolve(config.env)
    if config.env_frameskip is not None and _adapter(target) is None and group.spec.frames_per_step == 1:
        taken = _constructor_arguments(config, target, vector=isinstance(group, GymVector))
        if taken.keys() & set(CONSTRUCTOR_FLAGS["env_frameskip"]):
            group.spec = replace(group.spec, frames_per_step=config.env_frameskip)
    return group


def make_first(config: EnvConfig, given: int | None = None, **arguments: Any) -> GroupEnv:
    """Make a group of one environment, the model for all others; a vector may make more.

    Steps at random find out how a vector without a declaration goes on after an end.

    Args:
        config: flags of the environment.
        given: number of environments per group in the flags, which a vector makes at once, as it may make no other;
            0 without such flags; None: any number will do.
        arguments: arguments of `make_group`.

    Raises:
        UsageError, EnvironmentFailure: as `make_group`; the vector's fixed number is not the given number.
    """
    try:
        is_vector = is_vector_only(config) or config.env_vectorization == "native"
        group = make_group(config, given or 1 if is_vector else 1, **arguments)
    except OtherNumber as error:
        number = error.made if given is None else given
        if number < 2:
            raise
        group = make_group(config, number, **arguments)
    try:
        if isinstance(group, GymVector):
            group.settle_mode()
    except BaseException:
        group.close()
        raise
    return group


def with_precision(group: GroupEnv) -> EnvSpec:
    """Return the spec of a group with lines about numbers that lose digits in storage, found in random steps."""
    if not may_lose(group._observations.space):  # type: ignore[attr-defined]
        return group.spec
    until = time.monotonic() + PRECISION_SECONDS
    with watched(group) as precision, suppress(EnvironmentFailure):  # which the run meets, and has rules for
        random_steps(group, PRECISION_STEPS, np.random.default_rng(0), lambda: time.monotonic() > until)
    return replace(group.spec, notes=(*group.spec.notes, *precision.lines()))


def with_company(config: EnvConfig, spec: EnvSpec) -> EnvSpec:
    """Return the spec of an existing environment, with whether a second one can be made in this process."""
    if not _is_native(config, _resolve(config.env)):
        try:
            EnvSet([lambda: make_single(config)], config.env, RAISE).close()
        except MadeVector:  # its environments are together as it is
            pass
        except (UsageError, EnvironmentFailure) as error:
            return alone(spec, config.env, str(error))
    return replace(spec, one_per_process=False)


def alone(spec: EnvSpec, name: str, failure: str) -> EnvSpec:
    """Return the spec of an environment that excludes a second one, with the reason."""
    note = f"{name} allows one environment per process (of a second one: {failure}): each actor gets one"
    return replace(spec, one_per_process=True, notes=(*spec.notes, note))


def make_alone(config: EnvConfig, *, window: bool = False) -> GroupEnv:
    """Make one environment behind our own loop: a seed then means the same episodes with and without pictures.

    A native vector can be neither watched nor filmed; a vector plays only if nothing else can be made.

    Raises:
        UsageError, EnvironmentFailure: as `make_group`.
    """
    if is_vector_only(config):
        return _vector_alone(config)
    alone = replace(config, env_vectorization="python")
    if window:
        try:
            return make_group(alone, 1, render_mode="human")
        except (CannotBeDrawn, EnvironmentFailure) as error:  # a refused mode may be any error
            sys.stderr.write(printable(f"warning: no window: {error}\n"))
    try:
        return make_group(alone, 1)
    except UsageError:  # an argument of --env_kwargs that only the vector knows
        return _vector_alone(config)


def _vector_alone(config: EnvConfig) -> GroupEnv:
    try:
        return make_first(config, 0)
    except OtherNumber as error:
        vector = f"a vector of {error.made} environments"
        raise UsageError(f"{config.env} exists only as {vector}, of which none can be played alone") from None


def is_vector_only(config: EnvConfig) -> bool:
    """Return whether the environment exists only as a vector of environments."""
    target = _resolve(config.env)
    if isinstance(target, Registration):
        return target.entry_point is None
    if inspect.isclass(target):
        return issubclass(target, VectorEnv)
    return "num_envs" in inspect.signature(target).parameters


def make_single(config: EnvConfig, render_mode: str | None = None) -> SingleEnv:
    """Make one environment, as enjoy plays it.

    Raises:
        UsageError: the environment cannot be found or made as asked.
        EnvironmentFailure: code of the environment raised.
    """
    target = _target_of(config)
    arguments: dict[str, Any] = config.env_kwargs | ({"render_mode": render_mode} if render_mode else {})
    adapter = _adapter(target)
    with _construction(config.env, arguments):
        if adapter is not None and isinstance(target, Registration):
            env = adapter.make_single(target, config, arguments)
        else:
            env = _make_plain(config, target, arguments)
    if not isinstance(env, gymnasium.Env):
        raise UsageError(f"{config.env} made a {_kind(env)}, not a gymnasium.Env")
    _require_spaces(config, env)
    if render_mode and (made := getattr(env, "render_mode", None)) not in (render_mode, None):
        raise CannotBeDrawn(f"{config.env} was asked for render_mode={render_mode} and made {made}")
    know_actions_sooner(env)
    note_frames(env.observation_space, config.env_framestack)
    return as_flags_ask(env, config)


def _require_spaces(config: EnvConfig, env: Any) -> None:
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise SpaceMismatch(f"{config.env} has no {name}, which every Env sets in its __init__")


def _kind(env: object) -> str:
    return f"{type(env).__module__}.{type(env).__name__}"


def _make_plain(config: EnvConfig, target: Registration | Factory, arguments: dict[str, Any]) -> Any:
    """Make an environment without an adapter; wrappers skip and stack frames where it cannot itself."""
    taken = _constructor_arguments(config, target)
    repeats = config.env_frameskip if not taken.keys() & set(CONSTRUCTOR_FLAGS["env_frameskip"]) else None
    if repeats and "max_episode_steps" in taken:
        taken["max_episode_steps"] *= repeats  # --horizon counts what the agent does, the environment every repetition
    if isinstance(target, Registration):
        env: Any = make_registered(target, **(arguments | taken))
    else:
        ids, scaled = config.agent_id == "auto", config.action_scaling == "auto" or bool(config.continuous_as_bins)
        env = pettingzoo.as_gymnasium(target(**(arguments | taken)), config.env, ids=ids, scaled=scaled)
    if isinstance(env, VectorEnv):
        env.close()
        raise MadeVector(
            f"{config.env} made a {_kind(env)}, not a gymnasium.Env: a vector can be neither drawn nor played alone"
        )
    if isinstance(env, gymnasium.Env):
        _require_spaces(config, env)
    find_out_agents(env)
    if isinstance(env, gymnasium.Env):
        env = with_masks_of_method(env)
    several = num_agents_of(env) > 0
    if several:
        _check_repeats(config, taken)
    elif repeats:
        env = RepeatAction(env, repeats)
    if config.horizon is not None and (repeats or "max_episode_steps" not in taken):  # a mask may end a repetition
        env = TimeLimit(env, config.horizon)
    stacks = not several and not taken.keys() & set(CONSTRUCTOR_FLAGS["env_framestack"])
    return stack_frames(env, config.env_framestack) if stacks and config.env_framestack is not None else env


def _check_repeats(config: EnvConfig, taken: dict[str, int]) -> None:
    """Refuse wrappers of one agent: several agents end at steps of their own and see frames of their own."""
    for flag in ("env_frameskip", "env_framestack"):
        names = CONSTRUCTOR_FLAGS[flag]
        if getattr(config, flag) is not None and not taken.keys() & set(names):
            raise UsageError(
                f"--{flag}={getattr(config, flag)}: {config.env} has several agents and would have to do that itself, "
                f"but takes no argument {' or '.join(names)}"
            )


def _make_vector(config: EnvConfig, target: Registration | Factory, num_envs: int) -> AnyVectorEnv:
    arguments: dict[str, Any] = config.env_kwargs | _vector_arguments(config, target)
    if "num_envs" in arguments:
        raise UsageError("--env_kwargs num_envs: a vector is made as large as --num_envs_per_worker asks; leave it out")
    with _construction(config.env, arguments):
        if isinstance(target, Registration):
            env: Any = gymnasium.make_vec(target, num_envs, vectorization_mode="vector_entry_point", **arguments)
        else:
            taken = {"num_envs", "kwargs"} & _accepted(target)
            env = target(**({"num_envs": num_envs} if taken else {}), **arguments)
    if not isinstance(env, VectorEnv):
        raise UsageError(f"{config.env} takes num_envs and made a {_kind(env)}, not a gymnasium.vector.VectorEnv")
    for name in ("num_envs", "single_observation_space", "single_action_space"):
        if not hasattr(env, name):
            raise SpaceMismatch(f"{config.env} has no {name}, which every VectorEnv sets in its __init__")
    if env.num_envs != num_envs:
        env.close()
        asked = f"{num_envs} environment{'s' * (num_envs > 1)}"
        raise OtherNumber(
            f"{config.env} was asked for {asked} and made {env.num_envs}: if it makes no other number,"
            f" --num_envs_per_worker={env.num_envs} --worker_num_splits=1 fits",
            env.num_envs,
        )
    note_frames(env.single_observation_space, config.env_framestack)
    return vector_as_flags_ask(with_masks_of_methods(env), config)


def _is_native(config: EnvConfig, target: Registration | Factory) -> bool:
    """Return whether the native vector exists, can do what the flags ask, and so steps the envs."""
    has_vector = vector_only = is_vector_only(config)
    if isinstance(target, Registration):
        # gymnasium cannot apply the wrappers of a registration to a native vector
        has_vector = target.vector_entry_point is not None and not target.additional_wrappers
    if config.env_vectorization == "native" and not has_vector:
        raise UsageError(f"{config.env} has no vector entry point (--env_vectorization=native)")
    if config.env_vectorization == "python" and vector_only:
        raise UsageError(f"{config.env} exists only as a vector environment (--env_vectorization=python)")
    if not has_vector or config.env_vectorization == "python":
        return False
    if config.env_vectorization == "native" or vector_only:
        _require_able(config, target)
    return not _unmet_by_vector(config, target)


def _require_able(config: EnvConfig, target: Registration | Factory) -> None:
    """Refuse flags that the vector environment cannot follow (UsageError)."""
    if unmet := _unmet_by_vector(config, target):
        raise UsageError(f"the vector environment of {config.env} takes no argument for {unmet}")


def _unmet_by_vector(config: EnvConfig, target: Registration | Factory) -> str:
    """Return the first flag that the vector environment cannot follow; empty: none."""
    if config.observe_previous != "none":
        return f"--observe_previous={config.observe_previous}"
    accepted, taken = _accepted(target, vector=True), _vector_arguments(config, target)
    if not isinstance(_adapter(target), VectorAdapter):
        for flag, names in CONSTRUCTOR_FLAGS.items():
            if (value := getattr(config, flag)) is not None and not taken.keys() & set(names):
                return f"--{flag}={value}"
    unknown = [name for name in config.env_kwargs if name not in accepted and "kwargs" not in accepted]
    return f"--env_kwargs {unknown[0]}" if unknown else ""


def _vector_arguments(config: EnvConfig, target: Registration | Factory) -> dict[str, Any]:
    adapter = _adapter(target)
    if isinstance(adapter, VectorAdapter) and isinstance(target, Registration):
        return adapter.vector_arguments(config, target)
    return _constructor_arguments(config, target, vector=True)


def _constructor_arguments(
    config: EnvConfig, target: Registration | Factory, *, vector: bool = False
) -> dict[str, int]:
    """Return the given flags of `CONSTRUCTOR_FLAGS` that the constructor takes, as arguments."""
    accepted = _accepted(target, vector=vector)
    if isinstance(target, Registration) and not vector:
        accepted = accepted | {"max_episode_steps"}  # gymnasium.make wraps the environment
    given = {flag: value for flag in CONSTRUCTOR_FLAGS if (value := getattr(config, flag)) is not None}
    names = {flag: next((name for name in CONSTRUCTOR_FLAGS[flag] if name in accepted), None) for flag in given}
    return {name: given[flag] for flag, name in names.items() if name is not None}


def _accepted(target: Registration | Factory, *, vector: bool = False) -> set[str]:
    """Return the names of a constructor's arguments."""
    if not isinstance(target, Registration):
        return _names(target)
    entry_point = target.vector_entry_point if vector else target.entry_point
    if entry_point is None:
        return set()
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return {*(() if vector else target.kwargs), *_names(creator)}


def _names(creator: Callable[..., Any]) -> set[str]:
    """Return the names of arguments; `kwargs` stands for a parameter of any name that takes all keywords."""
    return {"kwargs" if p.kind is p.VAR_KEYWORD else p.name for p in inspect.signature(creator).parameters.values()}


def _adapter(target: Registration | Factory) -> Adapter | None:
    if not isinstance(target, Registration):
        return None
    names = (target.id, str(target.entry_point))
    return next((adapter for family, adapter in FAMILIES.items() if adapter and family.is_adapted(*names)), None)


@contextmanager
def _construction(name: str, arguments: Collection[str] = ()) -> Iterator[None]:
    """Silence the warnings of construction and turn errors into one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise UsageError(f"{name} needs a package that is not installed: {one_line(error)}") from error
        except (TypeError, gymnasium.error.Error) as error:
            if any("unexpected keyword argument 'render_mode'" in str(one) for one in (error, error.__cause__)):
                raise CannotBeDrawn(f"{name} cannot be drawn: it takes no render_mode") from error
            if any(f"unexpected keyword argument '{argument}'" in str(error) for argument in arguments):
                raise UsageError(f"{name} refuses its arguments (--env_kwargs): {one_line(error)}") from error
            is_call = "missing" in str(error) and "required" in str(error) and not comes_from_own_code(error)
            listed = str(error).partition(" required ")[2].partition(" was raised ")[0]
            if is_call and (missing := re.findall(r"'(\w+)'", listed)):
                values = " ".join(f"{argument}=VALUE" for argument in missing)
                raise UsageError(f"{name} needs arguments: --env_kwargs {values} ({one_line(error)})") from error
            reraise(name, error)
        except BaseException as error:
            reraise(name, error)


def _resolve(name: str) -> Registration | Factory:
    """Find the registration of an id, or the class or function that `package.module:Name` stands for."""
    if not name:
        raise UsageError("--env is missing: give a gymnasium id or package.module:Id")
    if given.is_given(name):
        return given.find(name)
    register_toys()
    module_name, colon, env_id = name.rpartition(":")
    if module_name == "envpool":  # has ids of its own
        _require_package(name, name)
        return envpool.registration(env_id)
    module = _import_user_module(name, module_name) if colon else None
    if module is not None and env_id not in gymnasium.registry and hasattr(module, env_id):
        return _factory(name, getattr(module, env_id))
    if env_id not in gymnasium.registry and (maker := pettingzoo.find(env_id, registered=module is not None)):
        return maker
    if module is None or env_id not in gymnasium.registry:  # the user's own may be called as those of a family are
        _require_package(env_id, env_id)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            registration = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise UsageError(_unknown(name, env_id, module)) from error
    if isinstance(registration.entry_point, str):
        _require_package(env_id, registration.entry_point)
    return registration


def _target_of(config: EnvConfig) -> Registration | Factory:
    """Find the target of the name; a soft horizon takes the place of the time limit of a registration."""
    target = _resolve(config.env)
    if config.soft_horizon and config.horizon is None and isinstance(target, Registration):
        return replace(target, max_episode_steps=NEVER) if target.max_episode_steps else target
    return target


def _unknown(name: str, env_id: str, module: ModuleType | None) -> str:
    """Return the line about an unknown name."""
    if module is None:
        return f"there is no environment {name}{suggestion(env_id, FAMILIES)}"
    candidates = [*(key for key in vars(module) if not key.startswith("_")), *gymnasium.registry]
    text = f"module {module.__name__} neither registers nor contains {env_id or 'an empty name'}"
    return registered_with_gym(module.__name__, env_id) or text + nearest(env_id, candidates, 3)


def _factory(name: str, attribute: object) -> Factory:
    """Return an attribute that is a class of environments, or a function of a module that imports such classes.

    A run from elsewhere can name any function, `os:system` too, with --env_kwargs as the arguments.
    """
    if isinstance(attribute, Registration) or not callable(attribute):
        raise UsageError(f"{name} is a {type(attribute).__name__}, not a class or function that makes an environment")
    made_by: Any = attribute
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    around = vars(sys.modules.get(str(getattr(made_by, "__module__", "")), object))
    if inspect.isclass(made_by):
        if not issubclass(made_by, _env_classes()):
            bases = "gymnasium.Env or VectorEnv, or pettingzoo.ParallelEnv or AECEnv"
            raise UsageError(f"{name} is no class of environments: it must be derived from {bases}")
    elif not any(
        issubclass(value, _env_classes())
        if inspect.isclass(value)
        else isinstance(value, ModuleType) and value.__name__ in ("gymnasium", "pettingzoo")
        for value in around.values()
    ):
        raise UsageError(f"{name} makes no environment: its module must import gymnasium, or a class of environments")
    return attribute


def is_factory(attribute: object) -> bool:
    """Return whether `package.module:Name` may stand for the class or function."""
    try:
        _factory("", attribute)
    except UsageError:
        return False
    return True


def _env_classes() -> tuple[type, ...]:
    return (gymnasium.Env, VectorEnv, *pettingzoo.classes())


def _import_user_module(name: str, module_name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{name}: {module_name or 'an empty name'} is not the name of a Python module")
    try:
        return import_user_module(module_name)
    except (Exception, SystemExit) as error:
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking and (module_name == lacking or module_name.startswith(f"{lacking}.")):
            raise UsageError(f"{name}: there is no module {lacking}") from error
        raise UsageError(f"{name}: importing {module_name} raised {type(error).__name__}: {one_line(error)}") from error


@functools.cache
def _require_package(env_id: str, id_or_entry_point: str) -> None:
    """Import the module that registers the id; complain in one line if the optional package is missing."""
    for family in FAMILIES:
        is_id = family.has_id(id_or_entry_point)
        if not is_id and not family.has_entry_point(id_or_entry_point):
            continue
        if find_spec(family.package) is None:
            raise UsageError(f"{env_id} needs the package {family.package}: {family.command}")
        if is_id and family.register is not None:
            with _construction(env_id):
                family.register()
