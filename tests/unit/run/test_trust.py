"""Runs that came from elsewhere use nothing unasked; the user's own are never asked for."""

import contextlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.saved_run import load_run
from appo.algorithms.run import trust
from appo.algorithms.run.config import Config, parse_train, resolve
from appo.algorithms.run.folder import MARK, MEASURED, journal, saved_flags
from appo.algorithms.run.observers import evaluation_words, trust_words
from appo.algorithms.run.trust import (
    ANSWERS,
    LOOKED_AT,
    OF_STRANGERS,
    PLAYED,
    TRAINED,
    Reading,
    is_marked,
    mark_of,
    marked,
    uses,
)
from appo.algorithms.tools.comparison.saved_runs import flags_of_run
from appo.algorithms.tools.flags import ReplayConfig
from appo.algorithms.tools.hub import _examine
from appo.algorithms.tools.replay_incident import replay
from appo.envs.harmless import harmful_arguments
from appo.utils.errors import AppoError, UsageError
from appo.utils.run_folder import RunFolder
from appo.utils.user_modules import import_user_module, keep_out_of


@pytest.fixture(autouse=True)
def _own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))


def permitted_flags(directory: Path, needed: Any, *, trust: bool = False, **given: Any) -> dict[str, object]:
    return Reading.of(directory, trust=trust).permitted(needed, remember=trust, **given)


def plant(directory: Path, *, mark: bool = False, **changed: object) -> Path:
    """A run with these flags, as a stranger would send it."""
    directory.mkdir(parents=True)
    flags: Mapping[str, object] = Config.from_flat({"env": "CartPole-v1"}).to_flat() | changed
    (directory / "config.json").write_text(json.dumps(marked(flags) if mark else flags))
    return directory


RISKS: list[tuple[str, dict[str, Any], frozenset[str] | None]] = [
    ("engine", {"env": "VizdoomBasic-v1", "env_kwargs": {"vizdoom_path": "/usr/bin/perl"}}, PLAYED),
    ("game file", {"env": "VizdoomBasic-v1", "env_kwargs": {"doom_game_path": "train_dir/e/replay.mp4"}}, PLAYED),
    ("scenario", {"env": "VizdoomBasic-v1", "env_kwargs": {"scenario_config_file": "../../evil.cfg"}}, PLAYED),
    ("game words", {"env": "VizdoomBasic-v1", "env_kwargs": {"game_args": "+exec evil"}}, PLAYED),
    ("class", {"env": "vizdoom.gymnasium_wrapper.gymnasium_env_defns:VizdoomScenarioEnv"}, PLAYED),
    ("pool", {"env": "envpool:D1Basic-v1", "env_kwargs": {"vzd_path": "/usr/bin/perl"}}, PLAYED),
    ("model", {"env": "Ant-v5", "env_kwargs": {"xml_file": "/tmp/evil.xml"}}, PLAYED),
    ("unknown", {"env": "Mine-v0", "env_kwargs": {"anything": 1}}, PLAYED),
    ("window", {"env_kwargs": {"render_mode": "human"}}, PLAYED),
    ("size", {"env": "ALE/Pong-v5", "env_kwargs": {"img_height": 10**6}}, PLAYED),
    ("as text", {"env_kwargs": '{"sutton_barto_reward": "x"}'}, PLAYED),
    ("module", {"env": "train_dir.e.evil:Env"}, PLAYED),
    ("network", {"encoder_custom": "evil:Net"}, ANSWERS),
    ("network by its other name", {"encoder": "evil:Net"}, TRAINED),
    ("algorithm", {"algo": "evil:Algorithm"}, LOOKED_AT),
    ("algorithm that is no name", {"algo": ["evil:Algorithm"]}, LOOKED_AT),
    ("callbacks", {"callbacks": ["evil:Callbacks"]}, TRAINED),
    ("summaries", {"custom_summaries": "evil:figures"}, TRAINED),
    ("mapping", {"policy_mapping": "evil:choose"}, TRAINED),
    ("weights", {"init_from": "/home/you/secret"}, TRAINED),
    ("evaluations", {"eval_env_kwargs": {"xml_file": "x"}}, TRAINED),
    ("tracker", {"with_wandb": True}, TRAINED),
    ("trackers", {"track": ["mlflow"]}, TRAINED),
    ("account", {"wandb_user": "stranger"}, TRAINED),
]


@pytest.mark.parametrize(("changed", "needed"), [risk[1:] for risk in RISKS], ids=[risk[0] for risk in RISKS])
def test_what_a_stranger_names_needs_trust_once(
    tmp_path: Path, changed: dict[str, Any], needed: frozenset[str] | None
) -> None:
    directory = plant(tmp_path / "e", **changed)
    with pytest.raises(UsageError) as refused:
        permitted_flags(directory, needed)
    text = str(refused.value)
    assert "\n" not in text
    assert list(changed)[-1].removesuffix("_custom") in text
    assert text.endswith("--trust if you know where it comes from")
    permitted_flags(directory, needed, trust=True)
    assert permitted_flags(directory, needed).items() >= changed.items()
    assert is_marked(RunFolder(directory).read_config())


def test_weights_of_a_stranger_answer_without_their_environment(tmp_path: Path) -> None:
    directory = plant(tmp_path / "e", env="evil:Env", callbacks=["evil:Callbacks"])
    assert permitted_flags(directory, ANSWERS)["env"] == "evil:Env"
    assert uses(saved_flags(directory), PLAYED) == ["env=evil:Env"]


HARMLESS: list[dict[str, Any]] = [
    {},
    {"env": "envpool:Pong-v5", "env_kwargs": {"img_height": 84}},
    {"env": "ALE/Pong-v5", "env_kwargs": {"frameskip": 2, "obs_type": "ram", "noop_max": 0}},
    {"env": "VizdoomBasic-v1", "env_kwargs": {"screen_resolution": "RES_160X120", "frame_skip": 4}},
    {"env": "Hopper-v5", "env_kwargs": {"healthy_z_range": [0.7, 2.0], "terminate_when_unhealthy": False}},
    {"env": "FrozenLake-v1", "env_kwargs": {"map_name": "8x8", "is_slippery": False}},
    {"env": "pettingzoo.sisl.pursuit_v5", "env_kwargs": {"max_cycles": 100}},
    {"env": "MiniGrid-Empty-5x5-v0", "env_kwargs": {"size": 8}},
    {"env": "toy/Counter-v0", "env_kwargs": {}},
    {"hidden_size": 64, "num_policies": 2, "learning_rate": 0.1, "save_best_metric": "len/mean"},
]


@pytest.mark.parametrize("changed", HARMLESS, ids=lambda changed: str(changed.get("env", "numbers")))
def test_what_the_installation_provides_needs_none(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert permitted_flags(plant(tmp_path / "e", **changed), TRAINED)["learning_rate"]


def test_harmless_arguments_are_bounded() -> None:
    arguments = {"img_height": 1024, "img_width": 1025, "stack_num": "4", "mode": [1, 2], "noop_max": [[1]]}
    assert harmful_arguments("ALE/Pong-v5", arguments) == ["img_width", "stack_num", "noop_max"]
    assert harmful_arguments("Mine-v0", {"a": None}) == ["a"]
    assert harmful_arguments("toy/Counter-v0", {"num_steps": 10, "delay": 1e5}) == ["delay"]


# The user's own runs.


def test_a_start_marks_what_it_writes(tmp_path: Path) -> None:
    directory = plant(tmp_path / "e", mark=True, env="mine:Env", callbacks=["mine:Callbacks"])
    assert permitted_flags(directory, TRAINED)["callbacks"] == ["mine:Callbacks"]
    content = RunFolder(directory).read_config()
    journal(directory, content, [], [0], {"costs": 1})
    assert RunFolder(directory).read_config() == content | {MEASURED: {"costs": 1}}
    assert is_marked(RunFolder(directory).read_config())
    assert MARK not in saved_flags(directory)
    (start,) = map(json.loads, RunFolder(directory).history.read_text().splitlines())
    assert start["flags"] == saved_flags(directory)


@pytest.mark.parametrize(
    ("name", "value", "still"),
    [
        ("env", "mine:Other", False),
        ("env_kwargs", {"path": "b"}, False),
        ("callbacks", [], False),
        ("with_wandb", True, False),
        ("algo", "mine:Algorithm", False),
        ("learning_rate", 0.5, True),
        ("train_dir", "/elsewhere", True),
        ("trust", True, True),
        (MEASURED, {"costs": 2}, True),
    ],
)
def test_a_mark_covers_whatever_could_reach_out(tmp_path: Path, name: str, value: object, still: bool) -> None:
    directory = plant(tmp_path / "e", mark=True, env="mine:Env", env_kwargs={"path": "a"}, callbacks=["mine:Callbacks"])
    content = RunFolder(directory).read_config()
    assert is_marked(content)
    assert is_marked(content | {name: value}) == still
    del content["env_kwargs"]
    assert not is_marked(content)


@pytest.mark.parametrize("mark", ["", "0" * 64, 5, None, ["a"], "\u0661"])
def test_marks_of_others_are_none(tmp_path: Path, mark: object) -> None:
    flags = {"env": "mine:Env"}
    assert is_marked(marked(flags))
    assert not is_marked(flags | {MARK: mark})
    assert not is_marked(flags | {MARK: mark_of(flags, bytes(32))})


def test_what_the_user_says_again_needs_no_trust(tmp_path: Path) -> None:
    directory = plant(tmp_path / "e", env="mine:Env", callbacks=["evil:C"])
    assert permitted_flags(directory, PLAYED, given=("env",))
    with pytest.raises(UsageError, match=r"would use callbacks=\['evil:C'\]"):
        permitted_flags(directory, TRAINED, given=("env",))
    words = [f"--train_dir={tmp_path}", "--experiment=e", "--env=mine:Env"]
    assert parse_train([*words, "--callbacks="]).env.env == "mine:Env"
    with pytest.raises(UsageError, match="callbacks"):
        parse_train(words)
    assert parse_train([*words, "--trust"]).logging.callbacks == ("evil:C",)
    assert not is_marked(RunFolder(directory).read_config())  # the start itself will


def test_trust_of_a_saved_run_is_not_asked_of_itself(tmp_path: Path) -> None:
    plant(tmp_path / "e", env="evil:Env", trust=True)
    with pytest.raises(UsageError, match="no mark of yours"):
        parse_train([f"--train_dir={tmp_path}", "--experiment=e"])


def test_an_empty_name_chooses_no_algorithm(tmp_path: Path) -> None:
    plant(tmp_path / "e", algo="evil:Algorithm")
    (tmp_path / "f.json").write_text('{"algo": ""}')
    where = {"train_dir": str(tmp_path), "experiment": "e"}
    for given in ({"algo": ""}, {"config": str(tmp_path / "f.json")}):
        with pytest.raises(UsageError, match="would use algo=evil:Algorithm"):
            resolve({**where, **given})


# The key.


def test_the_key_is_the_users_alone(tmp_path: Path) -> None:
    with pytest.raises(trust.NoKey):
        trust.read_key()
    key, path = trust.make_key(), tmp_path / "configuration" / "appo" / "key"
    assert len(key) == 32
    assert trust.make_key() == trust.read_key() == key == path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["key"]


@pytest.mark.parametrize(("content", "mode"), [(bytes(31), 0o600), (bytes(33), 0o600), (bytes(32), 0o640)])
def test_what_others_could_know_is_no_key(tmp_path: Path, content: bytes, mode: int) -> None:
    path = tmp_path / "configuration" / "appo" / "key"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    path.chmod(mode)
    for ask in (trust.read_key, trust.make_key):
        with pytest.raises(trust.NoKey, match=r"is no key|can be read by others"):
            ask()


def test_without_a_place_for_the_key_runs_go_on_unmarked(
    no_key: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert marked({"env": "mine:Env"}) == {"env": "mine:Env"}
    (line,) = caplog.messages
    assert line.startswith("no mark of yours on this run, later commands may ask for --trust: cannot write")
    directory = plant(tmp_path / "e", env="mine:Env")
    assert permitted_flags(directory, PLAYED, trust=True)["env"] == "mine:Env"
    with pytest.raises(UsageError, match="no mark of yours"):
        permitted_flags(directory, PLAYED)


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def damage(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def swap(directory: Path) -> None:
    flags = Config.from_flat({"env": "mine:Env"}).to_flat()
    (directory / "config.json").write_text(json.dumps(marked(flags)))


@pytest.mark.parametrize("change", [remove, damage, swap])
def test_a_verdict_is_of_what_was_read(tmp_path: Path, change: Callable[[Path], None]) -> None:
    of_stranger = Reading.of(plant(tmp_path / "e", env="evil:Env"))
    own = Reading.of(plant(tmp_path / "own", mark=True, env="mine:Env"))
    refusal = of_stranger.refusal(PLAYED)
    assert "env=evil:Env: --trust" in refusal
    for reading in (of_stranger, own):
        change(reading.directory)
    assert (of_stranger.refusal(PLAYED), own.refusal(PLAYED)) == (refusal, "")
    assert (of_stranger.limit, own.limit) == (OF_STRANGERS, None)
    assert (of_stranger.flags["env"], own.flags["env"]) == ("evil:Env", "mine:Env")


@pytest.mark.parametrize("mark", [False, True])
def test_a_start_keeps_the_verdict_on_the_flags_that_it_read(tmp_path: Path, mark: bool) -> None:
    """Else a checkpoint of any size would be read, as the marked flags of another run lie there by then."""
    words = [f"--train_dir={tmp_path}", "--experiment=e"]
    assert not parse_train([*words, "--env=CartPole-v1"]).trusted  # there is no such run
    directory = plant(tmp_path / "e", mark=mark)
    config = parse_train(words)
    (swap if not mark else remove)(directory)
    assert config.trusted == mark
    plant(tmp_path / "other")
    assert parse_train([f"--train_dir={tmp_path}", "--experiment=other", "--trust"]).trusted


@pytest.mark.parametrize("lies_there", [{}, {"env": "evil:Env"}, {"callbacks": ["evil:Callbacks"]}])
def test_commands_beside_a_run_are_not_told_to_trust_what_lies_there(
    tmp_path: Path, lies_there: dict[str, object]
) -> None:
    config = parse_train([f"--train_dir={tmp_path}", "--experiment=e", "--env=CartPole-v1"])
    plant(tmp_path / "e", **lies_there)
    assert trust_words() == ()
    assert "--trust" not in evaluation_words(config)


def test_where_no_mark_can_be_written_they_are(no_key: None) -> None:
    assert trust_words() == ("--trust",)


def test_a_relative_place_of_configuration_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.key_path() == tmp_path / ".config" / "appo" / "key"


# Code in folders of runs.


EVIL = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\nclass Env: pass\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs below the working directory, with code in it wherever one could put some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    folder = tmp_path / "runs_of_all"
    directory = plant(folder / "e", env="CartPole-v1")
    package = directory / "package"
    package.mkdir()
    for path in (directory / "evil.py", folder / "evil.py", package / "__init__.py", package / "inner.py"):
        path.write_text(EVIL)
    (tmp_path / "linked.py").symlink_to(directory / "evil.py")
    (tmp_path / "linked_package").symlink_to(package)
    (tmp_path / "mine.py").write_text(EVIL)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "runs_of_all.e.evil",
        "runs_of_all.evil",
        "runs_of_all.e.package",
        "runs_of_all.e.package.inner",
        "linked",
        "linked_package",
        "linked_package.inner",
    ],
)
def test_code_below_a_folder_of_runs_is_never_imported(runs: Path, name: str) -> None:
    keep_out_of(runs)
    with pytest.raises(ImportError, match="code in a folder of runs is never imported"):
        import_user_module(name)
    assert list(runs.rglob("*.ran")) == []
    assert not [module for module in sys.modules if module.startswith("runs_of_all.e")]


def test_code_beside_it_is(runs: Path) -> None:
    keep_out_of(runs, runs / "e")
    assert import_user_module("mine").Env
    del sys.modules["mine"]
    assert (runs.parent / "mine.ran").exists()


@pytest.mark.parametrize("flag", ["env", "encoder_custom", "algo"])
def test_even_a_run_that_is_trusted_brings_no_code_of_its_own(runs: Path, flag: str) -> None:
    directory = plant(runs / "f", **{flag: "runs_of_all.e.evil:Env"})
    config = EvaluationConfig(train_dir=str(runs), trust=True)
    readers = [
        lambda: load_run(RunFolder(directory), config),
        lambda: parse_train(["--train_dir=runs_of_all", "--experiment=f", "--trust"]).algorithm,
        lambda: flags_of_run(directory),
    ]
    for read in readers:
        with contextlib.suppress(AppoError):  # there is no checkpoint; in `compare` nothing is used
            read()
    assert list(runs.rglob("*.ran")) == []


# What only reads.


def test_a_strangers_algorithm_is_not_imported_to_be_compared(tmp_path: Path) -> None:
    flags = flags_of_run(plant(tmp_path / "e", algo="evil:Algorithm"))
    assert flags["algo"] == "evil:Algorithm"
    assert flags["learning_rate"]


def test_a_download_says_what_it_would_use(tmp_path: Path) -> None:
    directory = plant(tmp_path / "e", algo="evil:Algorithm", env="evil:Env")
    (directory / "checkpoint_p0").mkdir()
    told = "; to be played with --trust only, as it would use algo=evil:Algorithm, env=evil:Env"
    assert _examine(directory) == f"a policy of evil:Env{told}"


@pytest.mark.parametrize("whose", ["a stranger's", "changed", "the user's"])
def test_incidents_are_replayed_of_the_users_own_runs(tmp_path: Path, whose: str) -> None:
    own = whose != "a stranger's"
    directory = plant(tmp_path / "e", mark=own, env="nowhere:Env")
    flags = {"env": "nowhere:Env", "env_kwargs": {"path": "x"} if whose == "changed" else {}}
    incident = {
        "flags": flags, "index": 0, "error": "ValueError", "message": "", "place": "step", "seed": 1,
        "random_state": None, "actions": [], "num_steps": 0, "seeds": [], "traceback": "", "ended_process": False,
    }  # fmt: skip
    path = directory / "incidents" / "env_0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(incident))
    expected = "there is no module nowhere" if whose == "the user's" else "is of no run of yours, and would use env="
    with pytest.raises(UsageError, match=expected):
        replay(ReplayConfig(incident=str(path)))
    with pytest.raises(UsageError, match="there is no module nowhere"):
        replay(ReplayConfig(incident=str(path), trust=True))
