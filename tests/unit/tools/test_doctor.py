import json
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms import cli
from appo.algorithms.run.config import Config
from appo.algorithms.run.defaults import completed
from appo.algorithms.run.plan import Probe
from appo.algorithms.run.tuning.choice import NOTHING, Costs
from appo.algorithms.run.tuning.measure import Measurement
from appo.algorithms.tools import doctor, examine_env
from appo.algorithms.tools.doctor import (
    Finding,
    _spaces,
    of_installation,
    of_machine,
    recommendation,
    report_examination,
    report_inputs,
    report_scales,
)
from appo.algorithms.tools.examine_env import REPEATED_STEPS, Examination, crowd, examine
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.envs.spaces import ActionForm, spec_of
from appo.utils.errors import EnvironmentFailure, UsageError
from tests.unit.run.tuning.test_measure import MODELS, config_of
from tests.unit.runtime.worlds import SPEC

EXAM = Examination(200, None, 1000, 20, 50.0, 1.2e-5, 3e-5, 2e-4, 9e-5, 700, 512 << 10, 0)


class Odd(gymnasium.Env[np.ndarray, int]):
    """Ends after ten steps; its last observation, or its first one, does not depend on the seed alone."""

    observation_space = gymnasium.spaces.Box(0.0, 1e9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episodes = 0

    def __init__(self, odd_at: int = 10) -> None:
        self.odd_at, self.steps = odd_at, 0

    def _shown(self) -> np.ndarray:
        return np.float32([Odd.episodes if self.steps == self.odd_at else 0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        Odd.episodes, self.steps = Odd.episodes + 1, 0
        return self._shown(), {}

    def step(self, action: int):
        self.steps += 1
        return self._shown(), 0.0, self.steps == 10, False, {}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps, not by time."""
    monkeypatch.setattr(examine_env, "STEPPING_SECONDS", 1e9)
    monkeypatch.setattr(examine_env, "REPEATING_SECONDS", 1e9)
    monkeypatch.setattr(examine_env, "MOST_STEPS", 100)


@pytest.mark.parametrize(("vectorization", "mask"), [("python", ""), ("native", "observation")])
def test_an_environment_that_repeats_itself(vectorization: str, mask: str) -> None:
    config = config_of("toy/Spaces-v0", env_vectorization=vectorization, env_kwargs={"mask": mask})
    exam = examine(config.env)
    assert (exam.repeated, exam.differs_at) == (REPEATED_STEPS, None)
    assert exam.num_steps >= 100
    assert 0 < exam.median_seconds <= exam.slow_seconds <= exam.longest_seconds
    assert 0 < exam.grown_steps < exam.num_steps


@pytest.mark.parametrize(("odd_at", "differs_at"), [(10, 10), (0, 0)])
def test_an_environment_that_does_not_is_found_out(odd_at: int, differs_at: int) -> None:
    exam = examine(config_of("tests.unit.tools.test_doctor:Odd", env_kwargs={"odd_at": odd_at}).env)
    assert exam.differs_at == differs_at
    assert exam.reset_seconds is not None
    # A reset takes a step, which is none of the 100, nor of an episode.
    assert (exam.num_steps, exam.episodes, exam.episode_steps) == (109, 10, 10.0)


class Leaving(gymnasium.Env[Any, Any]):
    """Three agents in lists; the first one leaves after five steps, the others after nine."""

    observation_space, action_space = Odd.observation_space, Odd.action_space
    num_agents = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.steps = 0
        return [np.zeros(1, np.float32)] * 3, [{}] * 3

    def step(self, action: list[int]):
        self.steps += 1
        ends = [self.steps == 5, self.steps == 9, self.steps == 9]
        infos = [{"is_active": self.steps <= 5}, {}, {}]
        return [np.zeros(1, np.float32)] * 3, [0.0] * 3, ends, [False] * 3, infos


def test_episodes_are_measured_in_the_steps_of_their_agent() -> None:
    exam = examine(config_of("tests.unit.tools.test_doctor:Leaving").env)
    assert (exam.num_steps, exam.episodes) == (111, 33)  # eleven episodes of all, and one step of the next one
    assert exam.episode_steps == 11 * (5 + 9 + 9) / 33


def said(exam: Examination) -> dict[str, Finding]:
    from appo.envs.make import make_group

    return {
        finding.name: finding
        for finding in report_examination(exam, make_group(config_of("toy/Counter-v0").env, 1).spec)
    }


def test_what_an_examination_says() -> None:
    assert {name: (finding.state, finding.text) for name, finding in said(EXAM).items()} == {
        "seeding": ("ok", "the same seed and actions gave the same 200 steps again"),
        "episodes": ("ok", "20 of about 50 random steps; a new one begins on the step after the end"),
        "step time": ("ok", "median 12 us, 99 % below 30 us, longest 200 us; a reset 90 us"),
        "leaks": ("ok", "512 KiB and 0 open files more after 700 steps"),
    }


@pytest.mark.parametrize(
    ("changed", "name", "text"),
    [
        ({"differs_at": 0}, "seeding", "from the first observation on"),
        ({"differs_at": 17}, "seeding", "from step 17 on"),
        ({"episodes": 0, "reset_seconds": None}, "episodes", "none ended in 1000 random steps"),
        ({"longest_seconds": 1.5}, "step time", "longest 1.5 s"),
        ({"grown_bytes": 9 << 20}, "leaks", "9.0 MiB and 0 open files more after 700 steps: it leaks"),
        ({"grown_files": 9}, "leaks", "9 open files more after 700 steps: it leaks"),
    ],
)
def test_what_is_worth_a_note(changed: dict[str, Any], name: str, text: str) -> None:
    findings = said(EXAM._replace(**changed))
    assert [finding.name for finding in findings.values() if finding.state == "note"] == [name]
    assert text in findings[name].text


def test_this_installation_and_machine_are_in_order() -> None:
    found = [*of_installation(), *of_machine()]
    assert [finding.name for finding in found if finding.state == "bad"] == []
    assert {"python", "packages", "cores", "gpu", "memory", "open files"} <= {finding.name for finding in found}


def test_a_missing_package_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "safetensors" else "1.0")
    monkeypatch.setattr(doctor, "IMPORTED", ("no_such_module",))
    bad = [(finding.name, finding.text) for finding in of_installation() if finding.state == "bad"]
    assert bad == [
        ("packages", "safetensors missing: pip install -c constraints.txt -e ."),
        ("no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ]


@pytest.mark.parametrize(("name", "most"), [("FewPerProcess", 3), ("OnePerProcess", 1)])
def test_as_many_are_made_in_a_process_as_an_actor_has(name: str, most: int) -> None:
    config = config_of(f"tests.unit.envs.stubborn:{name}").env
    assert crowd(config, most, 1) == most
    for groups in ((most + 1, 1), (1, most + 1)):
        with pytest.raises(EnvironmentFailure, match=r"RuntimeError: (no more licences|Cannot create multiple)"):
            crowd(config, *groups)


def test_the_recommendation_is_what_a_start_would_choose() -> None:
    from appo.algorithms.run.tuning.network import probe

    config = config_of("toy/Zero-v0")
    costs = Costs(env=((1, 1e-3),), act=((1, 1e-5), (64, 1e-4)), learn=((1, 1e-6),), env_bytes=1 << 20)
    finding = recommendation(Measurement(probe(config), costs, 1.0), 2)
    assert finding.flags["inference"] == "local"
    assert finding.flags["num_workers"] == 2
    assert finding.text.startswith("--inference=local --num_workers=2 ")
    assert "env 1 ms" in finding.text
    by_rules = recommendation(Measurement(probe(config), None, 0.0), 2)
    assert by_rules.text.endswith("(by fixed rules)")


class InThisProcess:
    """An inquiry whose target runs here, when it is made."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], method: str) -> None:
        self.pipe, theirs = Pipe()
        target(theirs, Path(), *arguments)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()

    def answer(self, limit_seconds: float) -> object:
        return self.pipe.recv()

    answer_by = answer


@pytest.mark.parametrize("algo", ["BC", "MARWIL"])
def test_nothing_about_actors_is_recommended_to_algorithms_without(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.from_flat({"env": "toy/Zero-v0", "algo": algo, "device": "cpu"})
    costs = Costs(env=NOTHING, act=NOTHING, learn=((1, 1e-6),), env_bytes=0)
    measured = Measurement(Probe(SPEC, MODELS, completed(config, SPEC)), costs, 0.0)
    monkeypatch.setattr(doctor, "measure_run", lambda *_: measured)
    monkeypatch.setattr(examine_env, "enter", lambda *_: None)
    found = list(doctor.of_environment(config, InThisProcess, lambda *_: iter(())))  # type: ignore[arg-type]
    assert [finding for finding in found if finding.state == "bad"] == []
    assert "seeding" in [finding.name for finding in found]
    [finding] = [finding for finding in found if finding.name == "recommended"]
    assert finding.flags == {"inference": "local", "learner_main_loop_num_cores": 1}
    assert "no actors, 1 learner thread" in finding.text


def test_rewards_are_told_to_those_that_learn_from_them() -> None:
    assert "rewards" not in of_sizes(algo="BC", largest_reward=5e4, usual_reward=2e4)
    assert of_sizes(algo="MARWIL", largest_reward=5e4, usual_reward=2e4)["rewards"].state == "ok"
    assert of_sizes(algo="MARWIL", largest_reward=0.0, usual_reward=0.0)["rewards"].text == (
        "all 0 in 1000 random steps: those of datasets count"
    )


def test_findings_become_lines_or_json_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    found = [Finding("cores", "ok", "2"), Finding("env", "bad", "raises"), Finding("a", "ok", "b", {"x": 1})]
    monkeypatch.setattr(doctor, "findings", lambda given: iter(found[: given.get("rollout", 3)]))
    assert cli.run("doctor", []) == 1
    assert capsys.readouterr().out == (
        "ok    cores        2\nbad   env          raises\nok    a            b\n"
        "training will not work before what is bad has changed\n"
    )
    assert cli.run("doctor", ["--rollout=1"]) == 0
    assert capsys.readouterr().out.endswith("nothing is in the way of training\n")

    def talking(given: object) -> Iterator[Finding]:
        print("a module that is imported says hello")
        yield from found

    monkeypatch.setattr(doctor, "findings", talking)
    assert cli.run("doctor", ["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [{"name": f.name, "state": f.state, "text": f.text} for f in found],
        "recommended": {"x": 1},
    }


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--ray=local:2"], "--env is required"),
        (["--config=missing.toml"], "missing.toml"),
        (["--env=CartPole-v1", "--rollout=3"], "--batch_size=256 is not a multiple of --rollout=3"),
    ],
)
def test_flags_of_training_are_looked_at_with_and_without_an_environment(
    words: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("of_installation", "of_machine"):
        monkeypatch.setattr(doctor, name, lambda: ())
    monkeypatch.setattr(doctor, "of_processes", lambda *_: Finding("processes", "ok", ""))
    with pytest.raises(UsageError, match=error):
        cli.run("doctor", words)


def test_a_misspelt_flag_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"unknown flag --jsn; did you mean --json\?"):
        cli.run("doctor", ["--jsn"])


# ---- sizes


def of_sizes(action: gymnasium.spaces.Space[Any] | None = None, **settings: Any) -> dict[str, Finding]:
    """What is said of an environment with these actions; figures of an examination and flags are told apart."""
    figures = {name: settings.pop(name) for name in list(settings) if name in Examination._fields}
    config = Config.from_flat({"env": "none", **settings})
    seen = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    spec = spec_of(seen, action or gymnasium.spaces.Discrete(2), form=ActionForm.of(config.env))
    usual = {"shown": {"obs": (-1.0, 1.0)}, "usual_reward": 1.0, "largest_reward": 1.0}
    return {finding.name: finding for finding in report_scales(EXAM._replace(**(usual | figures)), spec, config)}


def numbers(*bounds: tuple[float, float]) -> gymnasium.spaces.Box:
    low, high = np.array(bounds, np.float32).T
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


def test_what_fits_is_fine() -> None:
    found = of_sizes(numbers((10, 30), (-0.01, 0.01)))
    assert {name: (finding.state, finding.text, finding.flags) for name, finding in found.items()} == {
        "observations": ("ok", "obs from -1 to 1; normalized", {}),
        "actions": ("ok", "2 numbers, mapped to their bounds", {}),
        "rewards": ("ok", "usually of size 1, at most 1; returns are normalized", {}),
    }
    assert "actions" not in of_sizes()
    assert "observations" not in of_sizes(shown={})


@pytest.mark.parametrize(("largest", "says"), [(1.0, False), (255.0, True)])
def test_bytes_above_the_bound_of_their_box_are_told(largest: float, says: bool) -> None:
    box = gymnasium.spaces.Box(0, 1, (8, 8, 1), np.uint8)
    spec = spec_of(box, gymnasium.spaces.Discrete(2))
    found = list(report_scales(EXAM._replace(shown={"obs": (0.0, largest)}), spec, Config.from_flat({"env": "none"})))
    assert [one.text for one in found if one.name == "observations"] == [
        "obs reaches 255, but networks divide by the upper bound of its Box, 1: correct the bound"
    ] * says


@pytest.mark.parametrize(
    ("settings", "name", "text", "flags"),
    [
        (
            {"normalize_input": False, "shown": {"obs": (0.0, 4000.0)}},
            "observations",
            "obs from 0 to 4e+03: networks learn from numbers near 1: --normalize_input=True",
            {"normalize_input": True},
        ),
        ({"normalize_input": False, "shown": {"o": (0.0, 0.01)}}, "observations", "o from 0 to 0.01: networks", None),
        (
            {"action": numbers((-1, 1), (10, 30)), "action_scaling": "off"},
            "actions",
            "a number within [10, 30]: a policy begins at 0 +- 1; --action_scaling=auto maps it to the bounds",
            {"action_scaling": "auto"},
        ),
        ({"action": numbers((-0.01, 0.01)), "action_scaling": "off"}, "actions", "begins at 0 +- 1; --action", None),
        ({"action": numbers((-50, 50)), "action_scaling": "off"}, "actions", "begins at 0 +- 1; --action", None),
        (
            {"action": numbers((-1, 1), (0, np.inf)), "initial_stddev": 0.4},
            "actions",
            "a number within [0, inf]: a policy begins at 1 +- 0.4; two bounds tell it where to look, --initial_stddev",
            {},
        ),
        ({"action": numbers((-np.inf, np.inf))}, "actions", "within [-inf, inf]: a policy begins at 0 +- 1; two", {}),
        ({"action": numbers((-1e6, 1e6))}, "actions", "begins at 0 +- 1e+06; narrower bounds, or a smaller", {}),
        (
            {"action": numbers((-1e6, 1e6)), "action_distribution": "tanh_gaussian"},
            "actions",
            "within [-1e+06, 1e+06]: a policy begins at 0 +- 1e+06; narrower bounds",
            {},
        ),
        ({"largest_reward": 0.0}, "rewards", "all 0 in 1000 random steps: only chance finds one; a larger --expl", {}),
        ({"largest_reward": 0.0, "algo": "APEX"}, "rewards", "all 0 in 1000 random steps: only chance finds one", {}),
        (
            {"largest_reward": 2e6, "usual_reward": 3.0},
            "rewards",
            "usually of size 3, at most 2e+06: the rare ones hide all others: --reward_clip=30",
            {"reward_clip": 30.0},
        ),
        (
            {"largest_reward": 5e4, "usual_reward": 2e4, "normalize_returns": False},
            "rewards",
            "usually of size 2e+04, at most 5e+04: a critic predicts numbers near 1: --normalize_returns=True",
            {"normalize_returns": True},
        ),
        (
            {"largest_reward": 5e-5, "usual_reward": 2e-5, "algo": "APEX"},
            "rewards",
            "a critic predicts numbers near 1: --reward_scale=50000",
            {"reward_scale": 5e4},
        ),
        (
            {"largest_reward": 5e-5, "usual_reward": 2e-5},  # returns are normalized, yet later than the first update
            "rewards",
            "a critic predicts numbers near 1: --reward_scale=50000",
            {"reward_scale": 5e4},
        ),
        (
            {"largest_reward": 5e4, "usual_reward": 5e4, "algo": "PPO", "normalize_returns": True},
            "rewards",
            "a critic predicts numbers near 1: --reward_scale=2e-05",
            {"reward_scale": 2e-5},
        ),
    ],
)
def test_the_flag_that_helps_is_said(settings: dict[str, Any], name: str, text: str, flags: dict | None) -> None:
    found = of_sizes(**settings)
    assert [finding.name for finding in found.values() if finding.state == "note"] == [name]
    assert text in found[name].text
    if flags is not None:
        assert found[name].flags == flags


@pytest.mark.parametrize(
    "settings",
    [
        {"normalize_input": False, "shown": {"obs": (0.0, 255.0)}, "obs_scale": 255.0},
        {"normalize_input": False, "shown": {"obs": (99.0, 101.0)}, "obs_subtract_mean": 100.0},
        {"action": numbers((-2, 2)), "action_scaling": "off"},
        {"action": numbers((-1, 1)), "action_distribution": "tanh_gaussian"},
        {"largest_reward": 2e6, "usual_reward": 3.0, "reward_clip": 30.0},
        {"largest_reward": 5e4, "usual_reward": 2e4, "normalize_returns": False, "reward_scale": 1e-4},
        {"largest_reward": 5e4, "usual_reward": 2e4},
        {"largest_reward": 5e4, "usual_reward": 2e4, "algo": "SAC", "categorical_critics": 8},
    ],
)
def test_what_flags_have_made_right_is_not_said_again(settings: dict[str, Any]) -> None:
    assert [finding.state for finding in of_sizes(**settings).values() if finding.state != "ok"] == []


class Wild(gymnasium.Env[Any, Any]):
    """Never ends; shows its steps, and pays -5 but for a million in every tenth step and nothing in every second."""

    observation_space, action_space = Odd.observation_space, Odd.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int):
        self.steps += 1
        reward = 1e6 if self.steps % 10 == 0 else -5.0 * (self.steps % 2)
        return np.float32([self.steps]), reward, False, False, {}


def test_sizes_are_measured_where_it_walks() -> None:
    config = config_of("tests.unit.tools.test_doctor:Wild")
    exam = examine(config.env)
    assert (exam.episodes, exam.num_steps, dict(exam.shown)) == (0, 100, {"obs": (1.0, 100.0)})
    assert (exam.usual_reward, exam.largest_reward) == (5.0, 1e6)
    spec = spec_of(Wild.observation_space, Wild.action_space)
    (endless,) = [one for one in report_examination(exam, spec) if one.name == "episodes"]
    assert (endless.state, "--horizon=1000 truncates it" in endless.text) == ("note", True)
    (ended,) = [one for one in report_examination(exam, spec, 5000) if one.name == "episodes"]
    assert (ended.state, ended.text) == ("ok", "none ended in 100 random steps, fewer than --horizon=5000")


class WithNothing(Wild):
    """A key of the observation is empty."""

    observation_space = spaces.Dict({"obs": Wild.observation_space, "none": spaces.Box(-1, 1, (0,))})

    def step(self, action: Any) -> Any:
        obs, *others = super().step(action)
        return {"obs": obs, "none": np.zeros(0, np.float32)}, *others

    def reset(self, **given: Any) -> Any:
        obs, info = super().reset(**given)
        return {"obs": obs, "none": np.zeros(0, np.float32)}, info


def test_a_key_without_numbers_has_no_size() -> None:
    assert dict(examine(config_of("tests.unit.tools.test_doctor:WithNothing").env).shown) == {"obs": (1.0, 100.0)}


def test_many_numbers_that_no_convolution_reads_are_noted() -> None:
    letters = spaces.Box(0, 127, (21, 79, 80), np.uint8)
    shown = spaces.Dict({"letters": letters, "view": spaces.Box(0, 255, (84, 84, 3), np.uint8)})
    [finding] = report_inputs(spec_of(shown, spaces.Discrete(2)), config_of("toy/Zero-v0"))
    assert finding.state == "note"
    assert finding.text.startswith("letters [21, 79, 80] is read as 132,720 numbers")
    asked = config_of("toy/Zero-v0", encoder_type="conv")
    assert list(report_inputs(spec_of(shown, spaces.Discrete(2)), asked)) == []


@pytest.mark.parametrize(("offset", "state"), [(1e9, "bad"), (1e3, "ok")])
def test_numbers_that_are_not_stored_as_they_are_are_bad(
    offset: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine_env, "STEPPING_SECONDS", 0.05)
    config = config_of("tests.unit.envs.test_conversion:Offset", env_kwargs={"offset": offset}, normalize_input=True)
    exam = examine(config.env)
    spec = spec_of(spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Discrete(2))
    [finding] = [one for one in report_scales(exam, spec, config) if one.name == "observations"]
    assert finding.state == state
    assert finding.text.startswith("observation key obs: 1000000001.0 is stored as 1000000000, as ") == (state == "bad")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("deep", "actions are masked by observation key 0.observation.action_mask"),
        ("info", "actions are masked by info key action_mask"),
        ("method", "actions are masked by the method action_masks() of the environment"),
    ],
)
def test_where_masks_are_is_said(where: str, said: str) -> None:
    with closing(make_group(EnvConfig(env="tests.unit.envs.mask_game:Game", env_kwargs={"where": where}), 1)) as group:
        assert _spaces(group.spec).endswith(f"; takes 5 choices, 4 choices; {said}")


def test_that_there_are_no_masks_and_which_keys_of_infos_mean_something_is_said() -> None:
    config = config_of("toy/Counter-v0").env
    with closing(make_group(config, 1)) as group:
        assert _spaces(group.spec).endswith("; actions are not masked")
        exam = examine(config)
    assert exam.said == ("episode_extra_stats", "true_reward")
    (episodes,) = [one for one in report_examination(exam, group.spec) if one.name == "episodes"]
    assert episodes.text.endswith("; infos hold episode_extra_stats, true_reward")
