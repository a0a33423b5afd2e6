import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from appo.envs import make, names
from appo.envs.agents import pettingzoo
from appo.envs.config import EnvConfig
from appo.envs.family import Adapter, Family
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import FAMILIES, check_name, make_alone, make_first, make_group, make_single, with_company
from appo.envs.names import bare, suggestion
from appo.envs.toys.toy import TOYS, CounterVector
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import CannotBeDrawn, EnvironmentFailure, SpaceMismatch, UsageError
from appo.utils.flags import flags_of
from tests.patience import HANG_SECONDS
from tests.unit.envs import stubborn
from tests.unit.envs.rollouts import collect

PACKAGE = {
    "__init__.py": "",
    "good.py": """
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from appo.envs.toys.toy import Corridor, CounterVector

class MyEnv(Corridor):
    def __init__(self, length=8, render_mode=None, frame_skip=1):
        super().__init__(length)
        self.render_mode, self.skip = render_mode, frame_skip

class Vector(CounterVector):
    pass

class Quitter(Corridor):
    def __init__(self):
        raise SystemExit("leaving")

def build(length=5):
    return MyEnv(length)

def number():
    return 3

constant = 3
gymnasium.register("mine/Registered-v0", entry_point=MyEnv, kwargs={"length": 6})
gymnasium.register("merge-mine-v0", entry_point=MyEnv)
""",
    "raising.py": "raise RuntimeError('no\\n licence')",
    "quitting.py": "import sys; sys.exit(1)",
    "lacking.py": "import a_package_that_is_not_there",
    "broken.py": "def (",
}


@pytest.fixture(autouse=True)
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package in the current directory of the user."""
    folder = tmp_path / "user_envs"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("mine/Registered-v0", "merge-mine-v0"):
        gymnasium.registry.pop(name, None)
    for name in [name for name in sys.modules if name.startswith("user_envs")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    ["CartPole-v1", "Pendulum-v1", *TOYS, "user_envs.good:MyEnv", "user_envs.good:build",
     "user_envs.good:mine/Registered-v0", "user_envs.good:CartPole-v1"],
)  # fmt: skip
def test_names_that_exist(name: str) -> None:
    check_name(EnvConfig(env=name))
    assert isinstance(make_single(EnvConfig(env=name)), gymnasium.Env)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", ["--env is missing"]),
        ("CartPol-v1", ["no environment CartPol-v1", "did you mean", "CartPole-v1"]),
        ("cartpole-v1", ["CartPole-v1"]),
        ("CartPole", ["did you mean CartPole-v1"]),  # a run must know its version
        ("CartPole-v99", ["no environment CartPole-v99", "CartPole-v1"]),
        ("toy/Memroy-v0", ["toy/Memory-v0"]),
        ("qqqqqqqq", ["there is no environment qqqqqqqq"]),
        ("Pong-v5", ["no environment Pong-v5; did you mean ALE/Pong-v5?"]),
        ("Breakout-v9", ["did you mean ALE/Breakout-v5"]),
        ("Breakot-v5", ["did you mean ALE/Breakout-v5?"]),
        ("DoorKey-5x5-v0", ["no environment DoorKey-5x5-v0; did you mean MiniGrid-DoorKey-5x5-v0?"]),
        ("GoToRedBall-v0", ["did you mean BabyAI-GoToRedBall-v0?"]),
        ("Basic-v1", ["did you mean VizdoomBasic-v1?"]),
        ("pursuit-v4", ["did you mean sisl/pursuit-v5?"]),
        ("a b!", ["there is no environment"]),
        (":MyEnv", ["an empty name is not the name of a Python module"]),
        ("../evil:MyEnv", ["not the name of a Python module"]),
        ("no_such_module:MyEnv", ["there is no module no_such_module"]),
        ("user_envs.nothing:MyEnv", ["there is no module user_envs.nothing"]),
        ("user_envs.good:", ["an empty name"]),
        ("user_envs.good:MyEnw", ["module user_envs.good neither registers nor contains MyEnw", "did you mean MyEnv"]),
        ("user_envs.good:mine/Registerd-v0", ["did you mean mine/Registered-v0"]),
        ("user_envs.good:constant", ["user_envs.good:constant is a int"]),
        ("user_envs.raising:MyEnv", ["importing user_envs.raising raised RuntimeError: no licence"]),
        ("user_envs.quitting:MyEnv", ["raised SystemExit: 1"]),
        ("user_envs.lacking:MyEnv", ["raised ModuleNotFoundError", "a_package_that_is_not_there"]),
        ("user_envs.broken:MyEnv", ["raised SyntaxError"]),
    ],
)
def test_wrong_names_are_one_line(name: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(EnvConfig(env=name))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_a_package_that_is_broken_in_whatever_way_has_nothing_to_suggest() -> None:
    def register() -> None:
        raise ValueError("numpy.dtype size changed, may indicate binary incompatibility")

    broken = Family("Broken", package="json", extra="broken", examples=(), register=register)
    assert suggestion("CartPol-v1", [broken]).startswith("; did you mean CartPole-v1")


@pytest.mark.parametrize(
    ("name", "family"),
    [pytest.param(name, family, id=name) for family in FAMILIES for name in family.examples],
)
def test_a_missing_optional_package_is_named(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "find_spec", lambda module: None)
    make._require_package.cache_clear()
    with pytest.raises(UsageError) as caught:
        check_name(EnvConfig(env=name))
    install = f'pip install "appo[{family.extra}]"'
    assert str(caught.value) == f"{name} needs the package {family.package}: {install}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Pong-v5", 'did you mean ALE/Pong-v5? It needs the package ale_py: pip install "appo[atari]"'),
        (
            "DoorKey-5x5-v0",
            'did you mean MiniGrid-DoorKey-5x5-v0? It needs the package minigrid: pip install "appo[minigrid]"',
        ),
        ("Basic-v1", 'did you mean VizdoomBasic-v1? It needs the package vizdoom: pip install "appo[vizdoom]"'),
        (
            "cheetah-run-v0",
            'did you mean dm_control/cheetah-run-v0? It needs the package dm_control: pip install "appo[dm-control]"',
        ),
        (
            "pursuit-v4",
            'PettingZoo, which is not installed, has environments of such names: pip install "appo[multiagent]"',
        ),
    ],
)
def test_a_name_without_its_prefix_tells_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """Where a package is not there nothing is registered, so the family is told by the names that it is known for."""
    monkeypatch.setattr(names, "find_spec", lambda package: None)
    monkeypatch.setattr(pettingzoo, "find_spec", lambda package: None)
    entries = {i: str(one.entry_point) for i, one in gymnasium.registry.items()}
    bare_registry = {
        i: gymnasium.registry[i] for i, entry in entries.items() if re.match(r"appo\.envs\.toys|gymnasium\.", entry)
    }
    monkeypatch.setattr(gymnasium, "registry", bare_registry)
    with pytest.raises(UsageError) as caught:
        check_name(EnvConfig(env=name))
    assert str(caught.value) == f"there is no environment {name}; {said}"


def test_the_names_by_which_families_are_known_are_those_of_their_environments() -> None:
    for family in FAMILIES:
        if not (family.names and family.prefixes and find_spec(family.package)):
            continue
        family.register()
        registered = [name for name in gymnasium.registry if family.has_id(name) and name[0] != "B"]
        unknown = [
            name
            for name in registered
            if name.startswith(family.prefixes[0]) and not re.fullmatch(family.names, bare(name, family.prefixes))
        ]
        # VizDoom has a name for every map of every game, and variants of each; shimmy's name takes any task.
        assert [name for name in unknown if family.name != "VizDoom" and "compatibility" not in name] == []


def test_no_optional_package_is_imported_to_know_the_families() -> None:
    packages = {family.package for family in make.FAMILIES}
    code = f"import sys, appo.envs.make; print(*sorted(sys.modules.keys() & {packages!r}))"
    root = Path(make.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("family", make.FAMILIES, ids=lambda family: family.name)
def test_every_family_has_an_extra_in_setup_and_a_way_to_be_recognized(family: Family) -> None:
    setup = Path(make.__file__).resolve().parents[1].joinpath("setup.py").read_text()
    assert f'    "{family.extra}": [' in setup
    assert family.ids or family.entry_points
    assert family.examples
    assert family.treatment
    assert all(flag in flags_of(EnvConfig) for flag in family.flags)
    assert len([other for other in make.FAMILIES if other.name == family.name]) == 1


def test_every_adapter_is_one_of_a_family() -> None:
    plain = {family.name for family, adapter in FAMILIES.items() if adapter is None}
    assert plain == {"MuJoCo", "Box2D"}
    assert all(isinstance(adapter, Adapter) for adapter in FAMILIES.values() if adapter is not None)


@pytest.mark.parametrize(
    ("env_id", "entry_point", "adapter"),
    [
        ("ALE/Pong-v5", "ale_py.env:AtariEnv", "atari"),
        ("mine/Pong-v0", "ale_py.env:AtariEnv", "atari"),
        ("MiniGrid-Mine-v0", "mine:Grid", "minigrid"),
        ("merge-mine-v0", "mine:Merge", None),  # a word that others use too
        ("HalfCheetah-v5", "gymnasium.envs.mujoco:HalfCheetahEnv", None),
        ("CartPole-v1", "gymnasium.envs.classic_control:CartPoleEnv", None),
    ],
)
def test_ids_and_entry_points_decide_which_adapter_makes_an_environment(
    env_id: str, entry_point: str, adapter: str | None
) -> None:
    found = make._adapter(Registration(env_id, entry_point=entry_point))
    assert found == (sys.modules[f"appo.envs.families.{adapter}"] if adapter else None)


def test_an_id_of_the_user_may_be_called_as_those_of_a_family_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "find_spec", lambda module: None)
    make._require_package.cache_clear()
    check_name(EnvConfig(env="user_envs.good:merge-mine-v0"))


def test_the_current_directory_is_searched_last() -> None:
    check_name(EnvConfig(env="user_envs.good:MyEnv"))
    assert sys.path[-1] == str(Path.cwd())
    before = list(sys.path)
    check_name(EnvConfig(env="user_envs.good:MyEnv"))
    assert sys.path == before


def test_arguments_reach_the_environment() -> None:
    env = make_single(EnvConfig(env="user_envs.good:MyEnv", env_kwargs={"length": 4}, env_frameskip=3), "rgb_array")
    assert (env.length, env.skip, env.render_mode) == (4, 3, "rgb_array")
    env = make_single(EnvConfig(env="user_envs.good:mine/Registered-v0", env_frameskip=2))
    assert (env.unwrapped.length, env.unwrapped.skip) == (6, 2)
    config = EnvConfig(env="toy/Memory-v0", env_kwargs={"num_cues": 5})
    assert make_single(config).action_space.n == 5
    assert config.env_kwargs == {"num_cues": 5}


@pytest.mark.parametrize("name", ["Limited", "Skipping", "vector_that_skips"])
def test_frames_of_the_flag_are_env_steps_whoever_skips_them(name: str) -> None:
    """A wrapper for the first one; an environment that reports another number knows better."""

    def frames(**flags: Any) -> list[int]:
        group = make_group(EnvConfig(env=f"{HERE}:{name}", **flags), 2)
        known = make_group(EnvConfig(env=f"{HERE}:{name}", **flags), 2, spec=group.spec)
        assert known.spec == group.spec
        rollout = collect(known, 2, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
        assert rollout.num_frames[0].tolist() == rollout.num_frames[1].tolist()
        return rollout.num_frames[0].tolist()

    long = {"length": 50}
    assert frames(env_kwargs=long) == [1, 1]
    assert frames(env_kwargs=long, env_frameskip=4) == [4, 4]
    if name != "Limited":
        assert frames(env_kwargs=long | {"frame_skip": 4}) == [1, 1]  # no flag
        assert frames(env_kwargs=long | {"reports": 3}, env_frameskip=4) == [3, 3]


@pytest.mark.parametrize("env", ["CartPole-v1", f"{__name__}:Skipping"])
def test_a_flag_replaces_the_same_argument_of_the_constructor(env: str) -> None:
    flags: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 200}, "horizon": 3}
    if env != "CartPole-v1":
        flags = {"env_kwargs": {"length": 50, "frame_skip": 3}, "env_frameskip": 2, "horizon": 3}
    single = make_single(EnvConfig(env=env, **flags))
    single.reset(seed=1)
    assert [single.step(0)[3] for _ in range(3)] == [False, False, True]
    assert getattr(single.unwrapped, "frame_skip", 2) == 2


def test_a_constructor_that_raises() -> None:
    with pytest.raises(EnvironmentFailure, match=r"user_envs\.good:Quitter raised SystemExit: leaving"):
        make_group(EnvConfig(env="user_envs.good:Quitter"), 2)


def test_a_vector_class_is_no_single_environment() -> None:
    with pytest.raises(UsageError, match=r"not a gymnasium\.Env"):
        make_single(EnvConfig(env="user_envs.good:Vector"))


@pytest.mark.parametrize(
    ("name", "vectorization", "kind"),
    [
        ("CartPole-v1", "auto", GymVector),
        ("CartPole-v1", "native", GymVector),
        ("CartPole-v1", "python", PythonLoop),
        ("Pendulum-v1", "auto", PythonLoop),
        ("toy/Zero-v0", "auto", GymVector),
        ("toy/Zero-v0", "python", PythonLoop),
        ("toy/Target-v0", "auto", PythonLoop),
        ("user_envs.good:Vector", "auto", GymVector),
        ("user_envs.good:MyEnv", "auto", PythonLoop),
    ],
)
def test_who_steps_the_group(name: str, vectorization: str, kind: type) -> None:
    group = make_group(EnvConfig(env=name, env_vectorization=vectorization), 3)
    assert isinstance(group, kind)
    assert group.num_rows == 3
    assert group.spec.frames_per_step == 1
    group.close()


def test_native_and_python_cart_pole_have_one_spec_and_both_run() -> None:
    groups = [make_group(EnvConfig(env="CartPole-v1", env_vectorization=kind), 4) for kind in ("python", "native")]
    assert groups[0].spec == groups[1].spec
    for group in groups:
        rollout = collect(group, 60, [1, 2, 3, 4], lambda obs: np.ones((4, 1), np.int32))
        assert rollout.terminated.sum(0).min() >= 4
        np.testing.assert_array_equal(rollout.reward, (~rollout.first[1:]).astype(np.float32))


def test_zero_vector_arguments() -> None:
    group = make_group(EnvConfig(env="toy/Zero-v0", env_kwargs={"obs_bytes": 28224, "episode_steps": 3}), 64)
    rollout = collect(group, 8, list(range(64)), lambda obs: np.zeros((64, 1), np.int32))
    assert rollout.obs["obs"].shape == (9, 64, 28224)
    assert rollout.truncated[:, 0].tolist() == [False, False, True, False, False, False, True, False]


def test_decorrelation_can_be_switched_off_and_depends_on_seed_and_worker() -> None:
    def first_steps(on: bool, seed: tuple[int, int] = (0, 0)) -> list[float]:
        config = EnvConfig(env="toy/Counter-v0", env_vectorization="python", decorrelate_envs_on_one_worker=on)
        group = make_group(config, 8, decorrelate_steps=10, seed=seed)
        obs = {"obs": np.zeros((8, 4), np.float32)}
        group.reset(range(8), obs)
        return [*obs["obs"][:, 1], *obs["obs"][:, 2]]

    assert first_steps(False) == [0.0] * 16
    assert first_steps(True, seed=(1, 2)) == first_steps(True, seed=(1, 2))
    assert first_steps(True, seed=(1, 2)) != first_steps(True, seed=(1, 3))
    assert first_steps(True, seed=(1, 2)) != first_steps(True, seed=(2, 2))


@pytest.mark.parametrize("name", ["toy/Corridor-v0", "user_envs.good:build"])
@pytest.mark.parametrize("frameskip", [None, 3])
def test_the_horizon_counts_steps_of_the_agent(name: str, frameskip: int | None) -> None:
    env = make_single(EnvConfig(env=name, horizon=5, env_frameskip=frameskip))
    env.reset(seed=1)
    outcomes = [env.step(0) for _ in range(5)]  # the left wall holds
    assert [outcome[3] for outcome in outcomes] == [False] * 4 + [True]
    assert [outcome[4].get("num_frames", 1) for outcome in outcomes] == [frameskip or 1] * 5


# --- functions and classes that make a vector


def vector_of(num_envs: int, length: int = 3) -> Any:
    return SyncVectorEnv([lambda: Limited(length)] * num_envs)


def vector_of_two(length: int = 3) -> Any:
    return vector_of(2, length)


def no_vector(num_envs: int = 1) -> Any:
    return Limited(num_envs)


class Limited(gymnasium.Env[Any, Any]):
    """Pays the number of the step, and ends after `length` of them."""

    observation_space = spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length, self.count = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.count += 1
        return np.full(1, self.count, np.float32), float(self.count), self.count == self.length, False, {}


class OwnNumber(SyncVectorEnv):
    """Takes no `num_envs`."""

    def __init__(self, length: int = 3) -> None:
        super().__init__([lambda: Limited(length)] * 2)


class Skipping(Limited):
    """Takes the frame skip itself, and reports so many frames, if any."""

    def __init__(self, length: int = 3, frame_skip: int = 1, reports: int = 0) -> None:
        super().__init__(length)
        self.frame_skip, self.reports = frame_skip, reports

    def step(self, action: int) -> Any:
        return *super().step(action)[:4], {"num_frames": self.reports} if self.reports else {}


def vector_that_skips(num_envs: int, length: int = 3, frame_skip: int = 1, reports: int = 0) -> Any:
    return SyncVectorEnv([lambda: Skipping(length, frame_skip, reports)] * num_envs)


class Bare(VectorEnv[Any, Any, Any]):
    def __init__(self, num_envs: int, **known: Any) -> None:
        vars(self).update({"num_envs": num_envs, "single_action_space": Limited.action_space} | known)


class Mistyped(Limited):
    def __init__(self) -> None:
        super().__init__()
        spaces.Box(0, 1, shap=(2,))  # type: ignore[call-arg]


class Needy(Limited):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, level: str = "easy", size: int | None = None, render_mode: str | None = None) -> None:
        assert render_mode is None or render_mode in self.metadata["render_modes"]
        if size is None:
            raise TypeError("Needy() missing 1 required positional argument: 'size'")
        super().__init__()


class FourValues(Limited):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


HERE = "tests.unit.envs.test_make"


def test_what_the_code_of_an_environment_mistypes_is_no_argument_of_the_user() -> None:
    with pytest.raises(EnvironmentFailure, match=r"Mistyped raised TypeError: .* unexpected keyword argument 'shap'"):
        make_single(EnvConfig(f"{HERE}:Mistyped"))
    with pytest.raises(UsageError, match=r"refuses its arguments \(--env_kwargs\): .*'shap'"):
        make_single(EnvConfig(f"{HERE}:Mistyped", env_kwargs={"shap": 1}))


def test_only_missing_arguments_are_asked_for() -> None:
    gymnasium.register("Needy-v0", lambda level, size: Limited())
    try:
        with pytest.raises(UsageError, match=r"^Needy-v0 needs arguments: --env_kwargs size=VALUE \("):
            make_single(EnvConfig("Needy-v0", env_kwargs={"level": "easy"}))
    finally:
        del gymnasium.registry["Needy-v0"]


def test_a_refused_window_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    make_alone(EnvConfig(f"{HERE}:Needy", env_kwargs={"size": 1}), window=True).close()
    assert capfd.readouterr().err.startswith(f"warning: no window: {HERE}:Needy raised AssertionError")


def test_a_step_of_four_values_is_told_behind_a_wrapper_too() -> None:
    group = make_group(EnvConfig(f"{HERE}:FourValues", horizon=5), 1)
    with pytest.raises(SpaceMismatch, match=r"FourValues: step must return \(observation, reward, terminated, trunc"):
        collect(group, 1, [0], lambda obs: ONE)
    group.close()


@pytest.mark.parametrize("vectorization", ["auto", "native"])
@pytest.mark.parametrize("name", ["vector_of", "OwnNumber", "vector_of_two"])
def test_functions_and_classes_that_make_vectors(name: str, vectorization: str) -> None:
    config = EnvConfig(f"{HERE}:{name}", env_kwargs={"length": 2}, env_vectorization=vectorization)
    if (name, vectorization) == ("vector_of_two", "native"):  # only by making it would it be known
        with pytest.raises(UsageError, match="has no vector entry point"):
            make_group(config, 2)
        return
    group = make_group(config, 2)
    assert isinstance(group, GymVector)
    rollout = collect(group, 4, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    assert rollout.reward.tolist() == [[1, 1], [2, 2], [0, 0], [1, 1]]
    assert rollout.terminated[:, 0].tolist() == [False, True, False, False]
    group.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "flags", "line"),
    [
        (
            "vector_of",
            {"num_envs": 4},
            {},
            "--env_kwargs num_envs: a vector is made as large as --num_envs_per_worker asks; leave it out",
        ),
        (
            "no_vector",
            {},
            {},
            f"{HERE}:no_vector takes num_envs and made a {HERE}.Limited, not a gymnasium.vector.Vect",
        ),
        (
            "vector_of",
            {},
            {"horizon": 5},
            f"the vector environment of {HERE}:vector_of takes no argument for --horizon=5",
        ),
        ("vector_of_two", {}, {"horizon": 5}, f"the vector environment of {HERE}:vector_of_two takes no argument for"),
        ("Bare", {}, {}, f"{HERE}:Bare has no single_observation_space, which every VectorEnv sets in its __init__"),
        (
            "vector_of",
            {"lenght": 2},
            {},
            f"the vector environment of {HERE}:vector_of takes no argument for --env_kwargs",
        ),
    ],
)
def test_vectors_that_cannot_be_made_are_told_why(name: str, kwargs: dict, flags: dict, line: str) -> None:
    with pytest.raises((UsageError, SpaceMismatch)) as raised:
        make_group(EnvConfig(f"{HERE}:{name}", env_kwargs=kwargs, **flags), 2)
    assert str(raised.value).startswith(line)


def test_a_vector_is_not_played_alone() -> None:
    with pytest.raises(
        UsageError,
        match=r"vector_of_two made a gymnasium\..*SyncVectorEnv, not a gymnasium.Env: a vector can be neither",
    ):
        make_single(EnvConfig(f"{HERE}:vector_of_two"))


@pytest.mark.parametrize(("version", "wrapper"), [("0.26.2", "GymV26"), ("0.21.0", "GymV21")])
def test_ids_of_old_gym_are_called_so(monkeypatch: pytest.MonkeyPatch, version: str, wrapper: str) -> None:
    ids: Any = {"Old-v0": 1}
    registry = ids if wrapper == "GymV26" else SimpleNamespace(env_specs=ids)
    gym = SimpleNamespace(__version__=version, envs=SimpleNamespace(registry=registry))
    monkeypatch.setitem(sys.modules, "gym", gym)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as raised:
        check_name(EnvConfig(f"{HERE}:Old-v0"))
    assert str(raised.value) == (
        f"module {HERE} registers Old-v0 with old gym {version}, not with gymnasium, which cannot make it; shimmy wraps"
        f' it: pip install "shimmy[gym-{wrapper[3:].lower()}]", --env=shimmy:{wrapper}Environment-v0'
        f" --env_kwargs env_id={HERE}:Old-v0"
    )
    with pytest.raises(UsageError, match="neither registers nor contains Older-v0"):
        check_name(EnvConfig(f"{HERE}:Older-v0"))


class Asserts(Limited):
    """Fails without a word in the place that is named."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        if place == "init":
            raise AssertionError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.place == "reset":
            raise AssertionError
        return super().reset()

    def step(self, action: int) -> Any:
        if self.place == "step":
            raise RuntimeError
        return super().step(action)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("init", "AssertionError: no text, in envs/test_make.py, line N: raise AssertionError"),
        ("reset", "AssertionError: no text, in envs/test_make.py, line N: raise AssertionError"),
        ("step", "RuntimeError: no text, in envs/test_make.py, line N: raise RuntimeError"),
    ],
)
def test_failures_without_a_text_show_their_place(place: str, said: str) -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        collect(make_group(EnvConfig(f"{HERE}:Asserts", env_kwargs={"place": place}), 1), 1, [0], lambda obs: ONE)
    assert re.sub(r"line \d+", "line N", str(raised.value)) == f"{HERE}:Asserts raised {said}"


ONE = np.zeros((1, 1), np.int32)


# --- environments that are not what was asked for


STUBBORN = "tests.unit.envs.stubborn"


class Spaceless(gymnasium.Env[Any, Any]):
    action_space = spaces.Discrete(2)


def test_an_environment_without_a_space_is_one_line() -> None:
    with pytest.raises(SpaceMismatch, match="has no observation_space, which every Env sets in its __init__"):
        make_single(EnvConfig(env=f"{__name__}:Spaceless"))


def test_a_vector_of_one_size_is_not_played_alone() -> None:
    with pytest.raises(
        UsageError, match="exists only as a vector of 8 environments, of which none can be played alone"
    ):
        make_alone(EnvConfig(env=f"{STUBBORN}:Fixed"))


@pytest.mark.parametrize(
    ("name", "asked", "made"),
    [("Fixed", 1, 8), ("Fixed", 4, 8), ("Fixed", 16, 8), ("Rounded", 1, 4), ("Rounded", 6, 8)],
)
def test_a_vector_with_a_number_of_its_own_is_refused_in_one_line(name: str, asked: int, made: int) -> None:
    many = f"{asked} environment{'s' * (asked > 1)}"
    with pytest.raises(UsageError) as caught:
        make_group(EnvConfig(f"{STUBBORN}:{name}"), asked)
    assert str(caught.value) == (
        f"{STUBBORN}:{name} was asked for {many} and made {made}: if it makes no other number,"
        f" --num_envs_per_worker={made} --worker_num_splits=1 fits"
    )


@pytest.mark.parametrize(("name", "given", "rows"), [("Fixed", 8, 8), ("Fixed", None, 8), ("Rounded", 8, 8)])
def test_one_that_is_asked_for_what_it_makes_is_taken(name: str, given: int | None, rows: int) -> None:
    group = make_first(EnvConfig(f"{STUBBORN}:{name}"), given)
    assert group.num_rows == rows
    assert len(collect(group, 5, list(range(rows)), lambda obs: np.zeros((rows, 1), np.int32)).reward) == 5


def in_eights(num_envs: int) -> Any:
    if num_envs % 8:
        raise ValueError("in eights")
    return CounterVector(num_envs)


def test_a_vector_is_first_made_with_the_number_of_the_flags() -> None:
    with contextlib.closing(make_first(EnvConfig(f"{__name__}:in_eights"), 16)) as group:
        assert group.num_rows == 16


@pytest.mark.parametrize("given", [0, 1, 4])
def test_one_that_is_asked_for_another_number_by_flags_is_refused(given: int) -> None:
    with pytest.raises(UsageError, match=rf"was asked for {max(1, given)} environments? and made 8"):
        make_first(EnvConfig(f"{STUBBORN}:Fixed"), given)


@pytest.mark.parametrize(
    ("grows", "words"),
    [
        ("space", "env 1 has other spaces than env 0: Box(0.0, 1.0, (2,), float32), not Box(0.0, 1.0, (1,), float32)"),
        ("agents", "env 1 has 2 agents, env 0 1"),
    ],
)
def test_instances_that_differ_are_refused(grows: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubborn.Growing, "made", 0)
    config = EnvConfig(f"{STUBBORN}:Growing", env_kwargs={"grows": grows})
    with pytest.raises(SpaceMismatch) as caught:
        make_group(config, 2)
    assert str(caught.value) == f"{STUBBORN}:Growing: {words}"
    monkeypatch.setattr(stubborn.Growing, "made", 0)
    spec = make_group(config, 1).spec
    with pytest.raises(SpaceMismatch, match=r"another space than those of the first|2 agents, the first one that was"):
        make_group(config, 1, spec=spec)


def test_another_render_mode_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(CannotBeDrawn, match="AlwaysHuman was asked for render_mode=rgb_array and made human"):
        make_single(EnvConfig(f"{STUBBORN}:AlwaysHuman"), "rgb_array")
    assert make_single(EnvConfig(f"{STUBBORN}:AlwaysHuman"), "human").render_mode == "human"


def eight() -> Any:
    """A vector without an argument for its number."""
    return stubborn.Fixed()


def any_number(num_envs: int = 1, **options: Any) -> Any:
    return CounterVector(num_envs, **options)


def test_environments_of_a_vector_that_a_function_makes_are_together() -> None:
    config = EnvConfig(f"{__name__}:eight")
    with contextlib.closing(make_first(config, 8)) as group:
        assert with_company(config, group.spec) == group.spec
    config = EnvConfig(f"{__name__}:any_number", env_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})
    with contextlib.closing(make_first(config)) as group:  # a name that stands for any argument may be any name
        assert group.spec.same_step


def test_one_that_allows_no_second_in_its_process_is_known() -> None:
    for name in ("OnePerProcess", "FewPerProcess"):
        config = EnvConfig(f"{STUBBORN}:{name}")
        group = make_group(config, 1)
        spec = with_company(config, group.spec)
        group.close()
        assert spec.one_per_process == (name == "OnePerProcess")
        failed = f"{config.env} raised RuntimeError: Cannot create multiple emulator instances per process"
        note = f"{config.env} allows one environment per process (of a second one: {failed}): each actor gets one"
        assert spec.notes == (note,) * spec.one_per_process
