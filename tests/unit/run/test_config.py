"""Flags, their sources and their checks, in process."""

import importlib
import json
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appo.algorithms.appo import presets as learning_presets
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.cli import parse
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.ppo import presets as ppo_presets
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.run import folder
from appo.algorithms.run.algorithms import (
    ALGORITHMS,
    BEST,
    better_algorithm,
    find_algorithm,
    find_preset,
    flag_table,
)
from appo.algorithms.run.config import (
    FLAGS,
    FLAGS_BY_PART,
    Config,
    changed_flags,
    parse_train,
    parse_train_flags,
    resolve,
)
from appo.algorithms.tools.train import asked_format, describe, format_flags
from appo.envs import families
from appo.envs import presets as env_presets
from appo.envs.config import EnvConfig
from appo.utils.command_line import flag_text, parse_command_line, words_of_flag
from appo.utils.errors import UsageError
from appo.utils.files import read_mapping, replaced_when_whole
from appo.utils.flags import flag, flags_of
from appo.utils.run_folder import append_json_line, write_json_atomic
from appo.utils.values import parse_text, shown
from benchmarks.scores import ppo_returns
from benchmarks.shared.workloads import words_of

FLAGS_OF_PPO = flag_table("PPO").by_part


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cartpole(*argv: str) -> Config:
    return parse_train(["--env=CartPole-v1", *argv])


def save(config: Config) -> Path:
    config.run.run_directory.mkdir(parents=True, exist_ok=True)
    path = config.run.run_directory / "config.json"
    write_json_atomic(path, config.to_flat())
    return path


def error_of(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_train(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- flags are fields


def test_every_flag_is_unique_and_says_what_it_does() -> None:
    names = [name for flags in FLAGS_BY_PART.values() for name in flags]
    assert len(names) == len(set(names)) == len(FLAGS)
    for each in (*FLAGS.values(), *flags_of(EvaluationConfig).values()):
        assert len(each.help) > 5, each.name
        assert not each.help.endswith("."), each.name
        assert not each.choices or each.default in each.choices, each.name


def test_no_negation_collides_with_another_flag() -> None:
    assert not {name for each in FLAGS.values() for name in each.negations} & set(FLAGS)


def test_defaults_lie_within_their_own_limits() -> None:
    assert Config.from_flat(Config().to_flat()) == Config()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("adam_eps", 1e-6),
        ("adam_beta1", 0.9),
        ("adam_beta2", 0.999),
        ("gae_lambda", 0.95),
        ("rollout", 32),
        ("use_rnn", True),
        ("rnn_type", "gru"),
        ("ppo_clip_ratio", 0.1),
        ("ppo_clip_value", 1.0),
        ("batch_size", 1024),
        ("num_batches_per_iteration", 1),
        ("ppo_epochs", 1),
        ("max_grad_norm", 4.0),
        ("use_spectral_norm", False),
        ("exploration_loss", "entropy"),
        ("exploration_loss_coeff", 0.003),
        ("value_loss_coeff", 0.5),
        ("with_vtrace", True),
        ("vtrace_rho", 1.0),
        ("vtrace_c", 1.0),
        ("policy_workers_per_policy", 1),
        ("num_policies", 1),
        ("max_policy_lag", 100),
        ("min_traj_buffers_per_worker", 2),
        ("decorrelate_envs_on_one_worker", True),
        ("set_workers_cpu_affinity", True),
        ("force_envs_single_thread", True),
        ("reset_timeout_seconds", 120),
        ("default_niceness", 0),
        ("train_in_background_thread", True),
        ("learner_main_loop_num_cores", 0),
        ("actor_worker_gpus", ()),
        ("experiment_summaries_interval", 20),
        ("benchmark", False),
        ("sampler_only", False),
        ("with_pbt", False),
        ("pbt_mix_policies_in_one_env", True),
        ("pbt_period_env_steps", 5_000_000),
        ("pbt_start_mutation", 20_000_000),
        ("pbt_replace_fraction", 0.3),
        ("pbt_mutation_rate", 0.15),
        ("pbt_replace_reward_gap", 0.1),
        ("pbt_replace_reward_gap_absolute", 1e-6),
        ("pbt_optimize_batch_size", False),
        ("pbt_target_objective", "true_reward"),
        ("pbt_min_episodes", 10),
        ("learning_rate", 1e-4),
        ("gamma", 0.99),
        ("stats_avg", 100),
        ("save_every_sec", 120),
        ("keep_checkpoints", 3),
        ("save_milestones_sec", -1),
        ("train_for_env_steps", 10**10),
        ("hidden_size", 512),
        ("nonlinearity", "elu"),
    ],
)
def test_defaults_of_the_original_are_kept(name: str, default: object) -> None:
    assert FLAGS[name].default == default


# ---- values


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--rollout=16"], "rollout", 16),
        (["--rollout", "16"], "rollout", 16),
        (["--train_for_env_steps=1e6"], "train_for_env_steps", 1_000_000),
        (["--train_for_env_steps", "10_000"], "train_for_env_steps", 10_000),
        (["--num_minibatches_to_accumulate", "-1"], "num_minibatches_to_accumulate", -1),
        (["--num_minibatches_to_accumulate=none"], "num_minibatches_to_accumulate", None),
        (["--reward_scale", "-1e-3"], "reward_scale", -1e-3),
        (["--train_until_return", "-.5"], "train_until_return", -0.5),
        (["--train_until_return=None"], "train_until_return", None),
        (["--use_rnn"], "use_rnn", True),
        (["--no_use_rnn"], "use_rnn", False),
        (["--use_rnn=False"], "use_rnn", False),
        *((["--use_rnn", word], "use_rnn", True) for word in ("t", "y", "T", "Y", "on", "yes", "1")),
        *((["--use_rnn", word], "use_rnn", False) for word in ("f", "n", "F", "N", "off", "no", "0")),
        (["--use_rnn", "false"], "use_rnn", False),
        (["--no_use_rnn=False"], "use_rnn", True),
        (["--use_rnn", "--no_use_rnn"], "use_rnn", False),
        (["--no_use_rnn", "--use_rnn"], "use_rnn", True),
        (["--device=gpu"], "device", "cuda"),
        (["--seed=3", "--seed=4"], "seed", 4),
        (["--encoder=my.module:Net"], "encoder_custom", "my.module:Net"),
        (["--encoder_mlp_layers=64,32"], "encoder_mlp_layers", (64, 32)),
        (["--encoder_mlp_layers", "64", "32"], "encoder_mlp_layers", (64, 32)),
        (["--encoder_mlp_layers", "64,", "32"], "encoder_mlp_layers", (64, 32)),
        (["--encoder_mlp_layers=[64, 32]"], "encoder_mlp_layers", (64, 32)),
        (["--encoder_mlp_layers=(64,)"], "encoder_mlp_layers", (64,)),
        (["--actor_worker_gpus="], "actor_worker_gpus", ()),
        (["--actor_worker_gpus=0"], "actor_worker_gpus", (0,)),
        (["--env_kwargs=a=1"], "env_kwargs", {"a": 1}),
        (["--env_kwargs", "a=1.5", "b=x=y", "c=True", "d=null", "e=[1]"], "env_kwargs",
         {"a": 1.5, "b": "x=y", "c": True, "d": None, "e": [1]}),
        (['--env_kwargs={"a": {"b": 2}}'], "env_kwargs", {"a": {"b": 2}}),
        (["--env_kwargs=a=__import__('os').system('false')"], "env_kwargs", {"a": "__import__('os').system('false')"}),
    ],
)  # fmt: skip
def test_values_are_parsed_by_type(words: list[str], name: str, value: object) -> None:
    parsed = parse_train_flags(words)[name]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rolout=3"], "unknown flag --rolout; did you mean --rollout?"),
        (["--batch-sizes=3"], "unknown flag --batch_sizes; did you mean --batch_size?"),
        (["--no_use_rn"], "unknown flag --no_use_rn; did you mean --no_use_rnn?"),
        (["--roll=3"], "unknown flag --roll; did you mean --rollout?"),
        (["--zzzzzzzz"], "unknown flag --zzzzzzzz (--help lists all)"),
        (["--nice\nname"], "unknown flag '--nice\\nname' (--help lists all)"),
        (["word"], "unexpected word word: flags are given as --name=value"),
        (["--rollout"], "--rollout: expected one argument"),
        (["--rollout", "--use_rnn"], "--rollout: expected one argument"),
        (["--rollout=x"], "--rollout must be a whole number, got x"),
        (["--rollout=1.5"], "--rollout must be a whole number, got 1.5"),
        (["--rollout="], "--rollout must be a whole number, got ''"),
        (["--rollout=1e400"], "--rollout must be a whole number, got 1e400"),
        (["--rollout=" + "9" * 400], "--rollout must be a whole number, got " + "9" * 77 + "..."),
        (["--rollout=0"], "--rollout must be at least 1, got 0"),
        (["--num_workers=-1"], "--num_workers must be at least 0, got -1"),
        (["--gamma=1.01"], "--gamma must be at most 1, got 1.01"),
        (["--gamma=nan"], "--gamma must be a finite number, got nan"),
        (["--pbt_mutation_rate=2"], "--pbt_mutation_rate must be at most 1, got 2.0"),
        (["--adam_beta1=1"], "--adam_beta1 must be at most 0.999999, got 1.0"),
        (["--use_rnn=maybe"], "--use_rnn must be True or False, got maybe"),
        (["--no_use_rnn=maybe"], "--no_use_rnn must be True or False, got maybe"),
        (["--rnn_type=grü"], "--rnn_type=grü is not one of gru, lstm; did you mean gru?"),
        (["--inference=CENTRAL"],
         "--inference=CENTRAL is not one of auto, central, local, serial; did you mean central?"),
        (["--encoder_mlp_layers=64,,3"], "--encoder_mlp_layers must be whole numbers separated by commas, got 64,,3"),
        (["--encoder_mlp_layers=64,0"], "--encoder_mlp_layers must be at least 1, got 0"),
        (["--env_kwargs=x"], "--env_kwargs must be key=value words, got x"),
        (["--env_kwargs={"], "--env_kwargs must be key=value words, got {"),
        (["--env_kwargs=" + '{"a":' * 20_000],
         "--env_kwargs must be key=value words, got " + ('{"a":' * 20)[:77] + "..."),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_one_line(words: list[str], message: str) -> None:
    assert error_of(*words) == message


class _Unset:
    pass


def test_a_field_that_is_no_flag_is_refused() -> None:
    @dataclass(frozen=True)
    class Plain:
        x: int = 1

    @dataclass(frozen=True)
    class Odd:
        x: _Unset | None = flag(None, "of no type a flag can have")

    for cls in (Plain, Odd):
        with pytest.raises(TypeError, match="is not a flag"):
            flags_of(cls)


def test_dict_defaults_are_not_shared() -> None:
    first, second = Config(), Config()
    first.env.env_kwargs["x"] = 1
    assert second.env.env_kwargs == {}


def test_tuples_of_words() -> None:
    @dataclass(frozen=True)
    class Words:
        names: tuple[str, ...] = flag((), "names")

    names = flags_of(Words)["names"]
    assert parse_text(names, "a, b") == ("a", "b")
    with pytest.raises(UsageError):
        parse_text(names, "a,,b")


# ---- checks across flags

LEGS = ("--deterministic_resume", "--save_every_env_steps=1000")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size=100"], "--batch_size=100 is not a multiple of --rollout=32"),
        (["--recurrence=5"], "--rollout=32 is not a multiple of --recurrence=5"),
        (["--recurrence=64"], "--rollout=32 is not a multiple of --recurrence=64"),
        (["--microbatch_size=33"], "--microbatch_size=33 is not a multiple of --rollout=32"),
        (["--microbatch_size=2048"], "--microbatch_size=2048 is larger than --batch_size=256"),
        (["--lr_adaptive_min=1"], "--lr_adaptive_min=1 is above --lr_adaptive_max=0.01"),
        (["--num_envs_per_worker=3", "--worker_num_splits=2"],
         "--num_envs_per_worker=3 is not a multiple of --worker_num_splits=2"),
        (["--save_every_env_steps=9"],
         "--save_every_env_steps is for --deterministic_resume; --save_every_sec for all other runs"),
        (["--deterministic_resume"], "--deterministic_resume needs --save_every_env_steps: by time, no checkpoint comes"
         " at the same place twice"),
        (
            [*LEGS, "--inference=local"],
            "--deterministic_resume with --inference=local needs --lockstep, or --inference=serial",
        ),
        ([*LEGS, "--num_policies=2"], "--deterministic_resume is for one policy, got --num_policies=2"),
        (["--lockstep", "--num_policies=2"], "--lockstep is for one policy, got --num_policies=2"),
        (
            [*LEGS, "--decorrelate_experience_max_seconds=2"],
            "--deterministic_resume allows no pauses by the clock: leave out --decorrelate_experience_max_seconds",
        ),
        (["--with_pbt"], "--with_pbt needs at least 2 policies that learn, got 1: raise --num_policies"),
        (["--verify_reproduction"], "--verify_reproduction needs --learning_rate=0, got 0.001"),
        (["--encoder_mlp_layers="], "--encoder_mlp_layers needs at least one layer"),
        (
            ["--precision=bf16", "--encoder_custom=a:B"],
            "--precision=bf16 is for built-in networks; with --encoder_custom all is computed in float32",
        ),
        (["--num_policies=64"], "--num_policies must be at most 63, got 64"),  # the owners of a slot are bits of a word
        (["--train_dir="], "--train_dir must not be empty"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_their_numbers(words: list[str], message: str) -> None:
    assert error_of("--env=CartPole-v1", *words) == message


def test_zero_means_automatic() -> None:
    config = cartpole("--num_envs_per_worker=3", "--num_policies=4", "--recurrence=0")
    assert config.sampling.worker_num_splits == 0
    assert config.learning.segment_steps == config.learning.rollout == 32
    assert cartpole("--recurrence=8").learning.segment_steps == 8


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "..", ".", ".hidden", "a b", "a;b", "$(id)", "a\nb", "ä", "x" * 201, "a`b", "-\t", "a%", "~"],
)
def test_names_that_could_leave_the_folder_or_reach_a_shell_are_refused(name: str) -> None:
    assert error_of("--env=CartPole-v1", f"--experiment={name}").startswith("--experiment=")


def test_good_names_are_accepted(tmp_path: Path) -> None:
    config = cartpole("--experiment=Run_1.b-2", "--experiments_root=group/sub", f"--train_dir={tmp_path}/ä b")
    assert config.run.run_directory == tmp_path / "ä b" / "group" / "sub" / "Run_1.b-2"
    for root in ("..", "a/../b", "/etc", "a//b"):
        assert error_of("--env=CartPole-v1", f"--experiments_root={root}").startswith("--experiments_root=")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert error_of("--env=CartPole-v1", "--train_dir=file").startswith("cannot list file")
    assert "is not a folder" in error_of("--env=CartPole-v1", "--train_dir=file/x", "--experiment=a")
    assert "is not a folder" in error_of("--env=CartPole-v1", "--train_dir=dangling", "--experiment=a")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert error_of("--env=CartPole-v1").endswith("is not writable")


def test_env_is_required() -> None:
    assert error_of() == "--env is required, for example --env=CartPole-v1"
    assert "there is no saved run train_dir/a" in error_of("--experiment=a")


def test_new_runs_are_numbered_after_their_env() -> None:
    for env, name in [
        ("CartPole-v1", "CartPole-v1"),
        ("ALE/Pong-v5", "Pong-v5"),
        ("my.module:Maze", "Maze"),
        ("a:../..", "run"),
    ]:
        first = parse_train([f"--env={env}"])
        assert first.run.experiment == f"{name}_1"
        save(first)
        Path("train_dir", f"{name}_9").mkdir()
        Path("train_dir", f"{name}_x").mkdir()
        assert parse_train([f"--env={env}"]).run.experiment == f"{name}_10"


# ---- sources


def test_sources_overrule_each_other_in_order() -> None:
    Path("f.json").write_text(json.dumps({"gamma": 0.5, "rollout": 16, "encoder": "m:C", "encoder_mlp_layers": [8]}))
    Path("f.toml").write_text("gamma = 0.5\nbatch_size = 1e3\nencoder_mlp_layers = [8]\n[env_kwargs]\nx = 1\n")
    save(cartpole("--experiment=a", "--ppo_epochs=3", "--rollout=8", "--encoder=m:C", "--encoder_mlp_layers=8"))
    given_flags = parse_train_flags(["--experiment=a", "--config=f.json", "--gamma=0.25"])
    config, origins = resolve(given_flags)
    assert (config.learning.gamma, origins["gamma"]) == (0.25, "command line")
    assert (config.learning.rollout, origins["rollout"]) == (16, "config file")
    assert (config.learning.ppo_epochs, origins["ppo_epochs"]) == (3, "saved run")
    assert (config.env.env, origins["env"]) == ("CartPole-v1", "saved run")
    assert origins["train_dir"] == "default"
    assert list(origins) == list(FLAGS)
    config, origins = resolve(parse_train_flags(["--env=CartPole-v1", "--config=f.toml", "--rollout=8"]))
    assert (config.learning.gamma, config.learning.batch_size) == (0.5, 1000)
    assert config.env.env_kwargs == {"x": 1}
    assert (config.model.use_rnn, origins["use_rnn"]) == (False, "env preset")
    assert (config.model.encoder_mlp_layers, origins["encoder_mlp_layers"]) == ((8,), "config file")
    assert (config.learning.vtrace_c, origins["vtrace_c"]) == (1.0, "default")
    lines = describe(config.to_flat(), origins)
    assert lines[0].startswith("env preset: ")
    assert "use_rnn=False" in lines[0]
    assert "encoder_mlp_layers=8" in lines[1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.json", '{"gama": 1}', "--config=f.json: unknown flag gama; did you mean gamma?"),
        ("f.json", '{"gamma": "x"}', "--config=f.json: --gamma must be a finite number, got x"),
        ("f.json", '{"gamma": true}', "--config=f.json: --gamma must be a finite number, got True"),
        ("f.json", '{"gamma": NaN}', "--config=f.json: --gamma must be a finite number, got nan"),
        ("f.json", '{"gamma": null}', "--config=f.json: --gamma must be a finite number, got None"),
        ("f.json", '{"rollout": 1.5}', "--config=f.json: --rollout must be a whole number, got 1.5"),
        ("f.json", '{"use_rnn": 1}', "--config=f.json: --use_rnn must be True or False, got 1"),
        ("f.json", '{"env": 1}', "--config=f.json: --env must be text, got 1"),
        ("f.json", '{"encoder_mlp_layers": ["8"]}',
         "--config=f.json: --encoder_mlp_layers must be whole numbers separated by commas, got ['8']"),
        ("f.json", '{"config": "g.json"}', "--config=f.json: a config file cannot name another one"),
        ("f.json", "[1]", "f.json must hold a mapping of flags to values"),
        ("f.json", '{"a"', "f.json is damaged: Expecting ':' delimiter: line 1 column 5 (char 4)"),
        ("f.toml", "env_kwargs = {x = 2020-01-01}",
         "--config=f.toml: --env_kwargs must be key=value words, got {'x': datetime.date(2020, 1, 1)}"),
        ("f.toml", "a = ", "f.toml is damaged: Invalid value (at end of document)"),
        ("g.json", "", "cannot read f.json: No such file or directory"),
    ],
)  # fmt: skip
def test_a_bad_config_file_is_one_line(name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    path = "f.json" if name == "g.json" else name
    assert error_of("--env=CartPole-v1", f"--config={path}") == message


def test_the_file_of_a_run_is_no_config_file() -> None:
    Path("f.json").write_text(json.dumps({**cartpole().to_flat(), "measured": {}, "mark": {}}))
    assert error_of("--config=f.json") == "--config=f.json: a run's own file: see --print_config"


def test_config_files_that_are_no_text() -> None:
    Path("f.json").write_bytes(b"\xff\xfe")
    Path("deep.json").write_text("[" * 100_000)
    Path("folder.json").mkdir()
    for name in ("f.json", "deep.json", "folder.json"):
        assert name in error_of("--env=CartPole-v1", f"--config={name}")


def test_yaml_is_read_safely() -> None:
    Path("f.yaml").write_text("gamma: !!python/object/apply:os.system ['false']\n")
    assert "damaged" in error_of("--env=CartPole-v1", "--config=f.yaml")
    Path("f.yaml").write_text("learning:\n  learning_rate: 3e-4\nuse_rnn: no\nseed: null\nencoder_mlp_layers: [8, 8]\n")
    config = cartpole("--config=f.yaml")
    assert (config.learning.learning_rate, config.model.use_rnn, config.run.seed) == (3e-4, False, None)
    assert config.model.encoder_mlp_layers == (8, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"gamma": 0.9}}', "gamma is a flag of learning, not of model"),
        ('{"gamma": 0.9, "learning": {"gamma": 0.8}}', "gamma is there twice"),
        ('{"learning": {"gama": 0.9}}', "unknown flag gama; did you mean gamma?"),
        ('{"learning": 3}', "unknown flag learning; did you mean learning_rate?"),
    ],
)
def test_a_bad_section_is_one_line(text: str, message: str) -> None:
    Path("f.json").write_text(text)
    assert error_of("--env=CartPole-v1", "--config=f.json") == f"--config=f.json: {message}"


def test_env_is_a_flag_and_a_section() -> None:
    Path("f.json").write_text('{"env": {"env": "CartPole-v1", "env_kwargs": {"x": 1}}, "model": {"encoder": "a:B"}}')
    config = parse_train(["--config=f.json"])
    assert (config.env.env, config.env.env_kwargs, config.model.encoder_custom) == ("CartPole-v1", {"x": 1}, "a:B")


def test_what_is_printed_is_a_config_file() -> None:
    words = ["--env=CartPole-v1", "--gamma=0.9", "--env_kwargs", 'text=a "b" \\ é', 'deep={"x": [1, true]}']
    config, origins = resolve(parse_train_flags(words))
    text = format_flags(config, origins, "toml")
    Path("f.toml").write_text(text)
    again, origins_again = resolve(parse_train_flags(["--config=f.toml"]))
    assert replace(again, run=config.run) == config
    assert "gamma = 0.9  # command line" in text
    assert "use_rnn = false  # env preset" in text
    assert "adam_beta1 = 0.9  # default" in text
    assert set(origins_again.values()) == {"config file", "command line", "default"}
    assert [name for name, origin in origins_again.items() if origin == "default"] == ["experiment"]
    values = json.loads(format_flags(config, origins, "json"))
    assert values["gamma"] == {"value": 0.9, "origin": "command line"}
    assert set(values) == set(FLAGS)


def test_mappings_with_nothing_in_them_are_printed_too() -> None:
    config, origins = resolve(parse_train_flags(["--env=CartPole-v1", "--env_kwargs", "x=null", "y={}"]))
    Path("f.toml").write_text(format_flags(config, origins, "toml"))
    assert parse_train(["--config=f.toml"]).env.env_kwargs == {"x": None, "y": {}}


def test_asking_for_the_configuration() -> None:
    assert asked_format(["--gamma=1"]) == ("", ["--gamma=1"])
    assert asked_format(["--print_config", "--gamma=1"]) == ("toml", ["--gamma=1"])
    assert asked_format(["--print_config=json"]) == ("json", [])
    with pytest.raises(UsageError, match="--print_config=xml is not one of toml, json"):
        asked_format(["--print_config=xml"])


def test_changed_flags_of_a_saved_run_are_accepted_unless_they_change_what_was_learned() -> None:
    save(cartpole("--experiment=a", "--seed=5"))
    config = parse_train(["--experiment=a", "--learning_rate=0.5", "--env=CartPole-v1"])
    assert (config.learning.learning_rate, config.run.seed) == (0.5, 5)
    assert error_of("--experiment=a", "--env=Acrobot-v1", "--hidden_size=8", "--encoder_mlp_layers=3", "--gamma=0") == (
        "run a cannot change env CartPole-v1 -> Acrobot-v1, hidden_size 512 -> 8, encoder_mlp_layers 64,64 -> 3;"
        " give another --experiment"
    )


def test_flags_of_the_first_weights_stay() -> None:
    save(cartpole("--experiment=a"))
    assert error_of("--experiment=a", "--policy_initialization=xavier_uniform", "--policy_init_gain=2") == (
        "run a cannot change policy_initialization orthogonal -> xavier_uniform, policy_init_gain 1 -> 2;"
        " give another --experiment"
    )


@pytest.mark.parametrize("learned", [False, True])
def test_a_temperature_that_is_learned_stays(learned: bool) -> None:
    save(parse_train(["--env=Pendulum-v1", "--algo=SAC", "--experiment=a", f"--learn_temperature={learned}"]))
    if learned:
        assert error_of("--experiment=a", "--temperature=0.5").startswith("run a cannot change temperature 1 -> 0.5")
    else:
        assert parse_train(["--experiment=a", "--temperature=0.5"]).learning.temperature == 0.5


def test_a_moved_run_is_found_where_it_is_now() -> None:
    save(cartpole("--experiment=a"))
    Path("train_dir").rename("elsewhere")
    config = parse_train(["--train_dir=elsewhere", "--experiment=a"])
    assert config.run.run_directory == Path("elsewhere/a")


def test_a_saved_run_of_another_version() -> None:
    path = save(cartpole("--experiment=a"))
    flat = read_mapping(path)
    del flat["vtrace_lambda"]
    write_json_atomic(path, flat)
    assert parse_train(["--experiment=a"]).learning.vtrace_lambda == 1.0
    write_json_atomic(path, flat | {"from_the_future": 1})
    assert error_of("--experiment=a").startswith("saved configuration of run a: unknown flag from_the_future")


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_saved_run_cut_at_any_byte_is_one_line(every: int) -> None:
    path = save(cartpole("--experiment=a"))
    text = path.read_bytes().rstrip()
    for length in range(0, len(text), every):
        path.write_bytes(text[:length])
        assert error_of("--experiment=a").startswith("train_dir/a/config.json is damaged: ")


def test_flat_round_trip_through_json() -> None:
    config = cartpole("--env_kwargs", "a=1", "--encoder_mlp_layers=3,4", "--seed=7", "--train_until_return=475")
    assert Config.from_flat(json.loads(json.dumps(config.to_flat()))) == config
    assert set(config.to_flat()) == set(FLAGS)


def test_changed_flags_are_listed() -> None:
    config = cartpole()
    other = replace(config, learning=replace(config.learning, gamma=0.5))
    assert changed_flags(config.to_flat(), other.to_flat()) == ["gamma 0.99 -> 0.5"]


# ---- presets


WITHOUT_FORCES = {"include_cfrc_ext_in_observation": False}
PENDULUMS = ("InvertedDoublePendulum", "InvertedPendulum")
PLAYING = [algo for algo in ALGORITHMS if find_algorithm(algo).needs_actors]


def require_values(algo: str, env: str, preset: str) -> None:
    """Parse and check a run, whose flags must be those of the preset."""
    config = parse_train([f"--env={env}", f"--algo={algo}", f"--preset={preset}"])
    known = find_preset(env, config.device, find_algorithm(algo), preset)
    flat = config.to_flat()
    assert known is not None
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()} == {
        name: flat[name] for name in known
    }


@pytest.mark.parametrize("algo", PLAYING)
def test_presets_name_existing_flags_with_valid_values(algo: str) -> None:
    examples = [module.FAMILY.examples[0] for module in families.modules().values()]
    for env in [*(f"{name}-v1" for name in env_presets.PRESETS), *examples]:
        require_values(algo, env, "default")
    for pattern in find_algorithm(algo).sample_efficient:
        require_values(algo, f"{pattern.replace('*', 'any')}-v1", "sample_efficient")


def test_ppo_has_settings_for_every_known_environment_that_a_network_can_train_with() -> None:
    of_families = {name: module.FAMILY.examples[0] for name, module in families.modules().items()}
    known = {name: f"{name}-v1" for name in env_presets.PRESETS} | {"pursuit": "sisl.pursuit_v4"}
    known |= {name: of_families[name] for name in env_presets.by_family().keys() - known.keys() - {"toy"}}
    for name, env in known.items():
        assert env_presets.find_name(env) == name
        require_values("PPO", env, "default")
        config = parse_train([f"--env={env}", "--algo=PPO"])
        config.learning.check(recurrent=config.model.use_rnn)
        has_defaults = name in ("FrozenLake", "CliffWalking", "Taxi", "pursuit")  # numbers and choices
        assert (config.learning == PPOConfig()) == has_defaults, name


@pytest.mark.parametrize("algo", ["a3c", "apex", "appo", "pqn", "ppo", "sac"])
def test_every_preset_of_an_algorithm_has_a_name_that_is_looked_up(algo: str) -> None:
    module = importlib.import_module(f"appo.algorithms.{algo}.presets")
    names, others = module.PRESETS.keys(), getattr(module, "WITHOUT_BUDGET", {}).keys()
    assert names | others <= env_presets.PRESETS.keys() | env_presets.by_family().keys()
    assert not names & others


@pytest.mark.parametrize("algo", ["APPO", "PPO"])
def test_sample_efficient_presets_bring_the_budget_of_the_published_return(algo: str) -> None:
    presets = find_algorithm(algo).sample_efficient
    assert {name for name, preset in presets.items() if preset["train_for_env_steps"] == 5_000_000} == {
        "BipedalWalker", "MiniGrid-FourRooms"
    }  # fmt: skip
    assert presets["Swimmer"]["gamma"] == 0.9999
    assert presets["Reacher"]["gamma"] == 0.9
    assert presets["Ant"]["env_kwargs"] == {"include_cfrc_ext_in_observation": False}
    assert presets["MiniGrid-DoorKey-5x5"]["exploration_loss_coeff"] == 0.0
    for env in ("envpool:Ant-v3", "envpool:Ant-v5"):
        preset = find_preset(env, "cpu", find_algorithm("PPO"), "sample_efficient")
        assert preset is not None
        assert preset["env_kwargs"] == {"use_contact_force": False}
    for env, mixing in {"ALE/Breakout-v5": 0.7, "PongNoFrameskip-v4": 0.85, "envpool:Qbert-v5": 0.95}.items():
        known = find_preset(env, "cpu", find_algorithm(algo), "sample_efficient") or {}
        assert (known["episodic_life"], known["vtrace_lambda" if algo == "APPO" else "gae_lambda"]) == (True, mixing)


@pytest.mark.parametrize(
    ("algo", "stddevs"),
    [
        ("PPO", {0.6065: ("Ant", "Hopper", "Humanoid", *PENDULUMS, "Reacher", "Walker2d")}),
        ("APPO", {0.6065: (*PENDULUMS, "Reacher"), 1.0: ("Hopper", "Humanoid", "Walker2d")}),
    ],
)
def test_a_recipe_brings_its_first_deviation(algo: str, stddevs: dict[float, tuple[str, ...]]) -> None:
    for expected, names in stddevs.items():
        for name in names:
            words = [f"--algo={algo}", f"--env={name}-v5", "--preset=sample_efficient"]
            assert parse_train(words).model.initial_stddev == expected, name


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("Walker2d-v5", {"gamma": 0.99, "normalize_returns": True, "initial_stddev": 0.6065, "batch_size": 64}),
        ("Ant-v5", {"gamma": 0.99, "normalize_returns": True, "initial_stddev": 0.6065, "env_kwargs": {}}),
        ("Swimmer-v5", {"gamma": 0.9999, "normalize_returns": True, "batch_size": 256, "rollout": 1024}),
        ("Reacher-v5", {"gamma": 0.9, "normalize_returns": True, "initial_stddev": 0.6065}),
        ("Pendulum-v1", {"gamma": 0.9, "normalize_returns": False, "learning_rate": 1e-3, "rollout": 1024}),
    ],
)
def test_a_default_preset_of_ppo_is_the_recipe_without_its_budget(env: str, expected: dict[str, object]) -> None:
    found = parse_train([f"--env={env}", "--algo=PPO"]).to_flat()
    assert {name: found[name] for name in expected} == expected
    assert (found["actor_critic_share_weights"], found["env_kwargs"]) == (False, {})
    assert found["train_for_env_steps"] == FLAGS["train_for_env_steps"].default


def test_apex_has_settings_for_images_only_where_images_are_shown() -> None:
    for env, batch_size in {"FrozenLake-v1": 64, "MiniGrid-Empty-5x5-v0": 64, "VizdoomBasic-v1": 512}.items():
        assert parse_train([f"--env={env}", "--algo=APEX"]).to_flat()["batch_size"] == batch_size, env


def test_without_a_recipe_ppo_has_the_discount_of_the_environment_and_the_settings_of_its_kind() -> None:
    for env, expected in {
        "MountainCarContinuous-v0": {"gamma": 0.999, **ppo_presets.CONTINUOUS},
        "VizdoomBasic-v1": ppo_presets.IMAGES,
        "highway-v0": {"gamma": 0.8},
        "Taxi-v3": {},
    }.items():
        known = find_preset(env, "cpu", find_algorithm("PPO"))
        assert known is not None
        assert {name: x for name, x in known.items() if name in FLAGS_OF_PPO["learning"]} == expected


@pytest.mark.parametrize("preset", ["default", "sample_efficient"])
@pytest.mark.parametrize("name", ppo_returns.TRIALS)
def test_presets_of_ppo_have_the_measured_flags(name: str, preset: str) -> None:
    trial = ppo_returns.TRIALS[name]
    asked = parse_train([*words_of(trial.training()), f"--preset={preset}"])
    found = parse_train([f"--env={trial.env}", "--algo=PPO", f"--preset={preset}"])
    without_effect = "policy_init_gain" if name == "half_cheetah" else "adaptive_stddev"
    better = {"ppo_epochs", "lr_schedule"} if (name, preset) == ("acrobot", "sample_efficient") else set[str]()
    flags = (FLAGS_OF_PPO["learning"] | FLAGS_OF_PPO["model"]).keys() - {without_effect, "initial_stddev"} - better
    one, other = asked.to_flat(), found.to_flat()
    assert {flag: one[flag] for flag in flags} == {flag: other[flag] for flag in flags}
    assert found.model.initial_stddev == pytest.approx(asked.model.initial_stddev, rel=1e-3)
    if preset != "default":
        assert found.run.train_for_env_steps == trial.env_steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--env=Taxi-v3",), "APPO has no such preset for Taxi-v3; it has one for CartPole, Acrobot, "),
        (("--env=mine:Game",), "APPO has no such preset for mine:Game; it has one for CartPole, "),
        (
            ("--env=CartPole-v1", "--algo=A3C"),
            "A3C has no such preset for CartPole-v1; --algo=APPO has one",
        ),
        (("--env=MountainCar-v0",), "APPO has no such preset for MountainCar-v0; --algo=PPO has one"),
        (("--env=Taxi-v3", "--algo=A3C"), "A3C has no such preset for Taxi-v3; it has none; APPO, PPO and"),
        (("--algo=BC", "--input=d"), "BC has no such preset for datasets; it has none; "),
    ],
)
def test_a_preset_that_does_not_exist_is_refused(words: tuple[str, ...], message: str) -> None:
    said = error_of(*words, "--preset=sample_efficient")
    assert said.startswith(f"--preset=sample_efficient: {message}")
    assert "ALE/Breakout" not in said  # ALE/* contains the game


@pytest.mark.parametrize("words", [("--preset=none",), ("--no_presets",), ("--no_preset",), ("--presets=none",)])
def test_without_presets_every_flag_has_its_default(words: tuple[str, ...]) -> None:
    config, origins = resolve(parse_train_flags(["--env=ALE/Pong-v5", *words]))
    assert set(origins.values()) == {"command line", "default"}
    assert not config.undecided
    assert config.run.preset == "none"
    assert cartpole("--no_presets=False").run.preset == "default"
    assert cartpole("--no_presets", "--use_rnn=False").learning.batch_size == 1024


def test_a_resumed_run_keeps_its_preset() -> None:
    save(cartpole("--experiment=a", "--preset=sample_efficient"))
    assert parse_train(["--experiment=a"]).learning.ppo_epochs == 20
    assert parse_train(["--experiment=a", "--preset=sample_efficient"]).run.preset == "sample_efficient"
    assert error_of("--experiment=a", "--no_presets") == (
        "run a cannot change preset sample_efficient -> none; give another --experiment"
    )


def test_given_arguments_are_added_to_those_of_the_preset() -> None:
    words = ["--env=Ant-v5", "--preset=sample_efficient", "--env_kwargs", "reset_noise_scale=0.2"]
    assert parse_train(words).env.env_kwargs == {"include_cfrc_ext_in_observation": False, "reset_noise_scale": 0.2}
    words[-1] = "include_cfrc_ext_in_observation=true"
    assert parse_train(words).env.env_kwargs == {"include_cfrc_ext_in_observation": True}


@pytest.mark.parametrize("algo", ["APPO", "PPO"])
@pytest.mark.parametrize(
    ("env", "words", "arguments"),
    [
        ("Ant-v5", [], WITHOUT_FORCES),
        ("Ant", [], WITHOUT_FORCES),  # gymnasium takes the newest version
        ("Ant-v4", [], {}),
        ("gymnasium.envs:Ant-v4", [], {}),
        ("Ant-v4", ["--env_kwargs", "reset_noise_scale=0.2"], {"reset_noise_scale": 0.2}),
        ("ALE/Pong-v5", [], {"use_fire_reset": True}),
        ("PongNoFrameskip-v4", [], {"use_fire_reset": True}),  # our adapter knows the argument
    ],
)
def test_an_old_version_gets_only_arguments_that_it_takes(
    algo: str, env: str, words: list[str], arguments: dict[str, object]
) -> None:
    found = parse_train([f"--env={env}", f"--algo={algo}", "--preset=sample_efficient", *words])
    assert found.env.env_kwargs == arguments


# ---- the best algorithm


def test_the_best_measured_algorithm_is_chosen() -> None:
    Path("f.toml").write_text('algo = "auto"\nenv = "Acrobot-v1"\n')
    for words, algo in (
        (["--env=Acrobot-v1", "--algo=auto", "--normalize_advantages=off"], "PPO"),
        (["--env=Acrobot-v1", "--algo=auto", "--no_presets"], "APPO"),
        (["--env=LunarLander-v3", "--algo=auto", "--preset=sample_efficient"], "PPO"),
        (["--env=Pendulum-v1", "--algo=auto", "--preset=sample_efficient"], "SAC"),
        (["--env=Walker2d-v5", "--algo=auto"], "APPO"),
        (["--env=HalfCheetah-v5", "--algo=auto", "--preset=sample_efficient"], "APPO"),
        (["--env=Walker2d-v5", "--algo=auto", "--preset=sample_efficient"], "PPO"),
        (["--env=mine:Game", "--algo=auto"], "APPO"),
        (["--env=MountainCar-v0", "--algo=auto", "--preset=sample_efficient"], "PPO"),  # which alone has such a preset
        (["--env=LunarLander-v3", "--algo=auto"], "PQN"),
        (["--env=LunarLander-v3", "--env_kwargs", "continuous=True", "--algo=auto"], "APPO"),  # another task
        (["--env=Acrobot-v1"], "APPO"),
        (["--config=f.toml"], "PPO"),
        (["--config=f.toml", "--env=CartPole-v1"], "APPO"),
    ):
        assert parse_train(words).run.algo == algo, words
    save(parse_train(["--env=Acrobot-v1", "--experiment=a"]))
    assert parse_train(["--experiment=a", "--env=Acrobot-v1", "--algo=auto"]).run.algo == "APPO"
    assert error_of("--experiment=a", "--algo=PPO").startswith("run a cannot change algo APPO -> PPO")


def test_a_preset_gives_way_to_datasets() -> None:
    words = ["--env=Hopper-v5", "--preset=sample_efficient", "--input", "sampler:0.5", "d:0.5"]
    alone, mixed = parse_train(words[:2]).learning, parse_train(words).learning
    assert (alone.lr_schedule, alone.with_vtrace) == ("kl_adaptive_epoch", False)
    assert (mixed.lr_schedule, mixed.with_vtrace) == ("constant", True)
    said = error_of(*words, "--lr_schedule=kl_adaptive_epoch")
    assert said.startswith("--lr_schedule=kl_adaptive_epoch: with --input, the KL divergence")


def test_every_best_preset_exists_and_is_named_once() -> None:
    for preset, table in BEST.items():
        for name, best in table.items():
            require_values(best.algo, f"{name}-v1", preset)
            assert better_algorithm(best.algo, f"{name}-v1", preset) == ""
    line = "PPO reaches -74.5 here in 1,000,000 env steps: --algo=PPO"
    for algo in (*ALGORITHMS, "examples.reinforce:REINFORCE"):
        assert better_algorithm(algo, "Acrobot-v1", "default") == (line if algo == "APPO" else ""), algo
    assert better_algorithm("APPO", "LunarLander-v3", "default", {"continuous": True}) == ""
    assert better_algorithm("APPO", "Acrobot-v1", "none") == better_algorithm("APPO", "Taxi-v3", "default") == ""


def test_envs_know_environment_and_network_and_the_algorithm_the_rest() -> None:
    ours = flags_of(EnvConfig).keys() | flags_of(ModelConfig).keys()
    of_families = env_presets.by_family().values()
    tables = (*env_presets.PRESETS.values(), *(one.network | one.network_on_cpu for one in of_families))
    assert all(values.keys() <= ours for values in (*tables, dict.fromkeys(env_presets.BY_KIND)))
    tables = (*learning_presets.PRESETS.values(), *(one.learning | one.learning_on_cpu for one in of_families))
    assert all(values.keys() <= FLAGS.keys() - ours for values in (*tables, dict.fromkeys(learning_presets.BY_KIND)))


def test_settings_of_learning_are_for_environments_that_envs_know() -> None:
    assert learning_presets.PRESETS.keys() | env_presets.DISCOUNTS.keys() <= env_presets.PRESETS.keys()
    assert not env_presets.by_family().keys() & env_presets.PRESETS.keys()


def test_the_name_of_a_family_is_no_environment() -> None:
    assert [env_presets.find_name(name) for name in ("atari", "atari-v0", "vizdoom")] == [None, None, None]
    of_examples = {name: env_presets.find_name(of.FAMILY.examples[0]) for name, of in families.modules().items()}
    expected = {name: name for name in of_examples} | {
        "envpool": "atari",
        "mujoco": "HalfCheetah",
        "box2d": "LunarLander",
    }
    assert of_examples == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"encoder_subtype": "resnet_impala"}, ("resnet", "resnet_impala")),
        ({"encoder_type": "resnet"}, ("resnet", "auto")),
        ({"encoder_type": "mlp"}, ("mlp", "auto")),
        ({"encoder_type": "conv"}, ("conv", "convnet_dqn")),
        ({}, ("conv", "convnet_dqn")),
    ],
)
def test_an_encoder_that_is_asked_for_takes_the_place_of_the_presets(
    given: dict[str, str], expected: tuple[str, str]
) -> None:
    model = resolve({"env": "ALE/Pong-v5", "device": "cpu", "experiment": "a", **given})[0].model
    assert (model.encoder_type, model.encoder_subtype) == expected


def test_presets_match_whole_names() -> None:
    known = find_preset("CartPole-v1", "cpu", APPO())
    assert (
        known
        == find_preset("gymnasium.envs:CartPole-v0", "cpu", APPO())
        == find_preset("CartPole", "cuda", APPO())
        != {}
    )
    for unknown in ("CartPoleSwing-v1", "mine:Pong-v5", "parking-v0", "maze:MazeDeterministic-v0"):
        assert find_preset(unknown, "cpu", APPO()) is None
    assert find_preset("my_traffic:intersection-v0", "cpu", APPO()) is None  # a common word
    assert find_preset("highway_env:merge-v0", "cpu", APPO()) == find_preset("merge-v0", "cpu", APPO()) != {}
    assert find_preset("toy/Memory-v0", "cpu", APPO()) == {}
    assert find_preset("ALE/Pong-v5", "cuda", APPO())["encoder_subtype"] == "convnet_atari"
    assert find_preset("PongNoFrameskip-v4", "cpu", APPO())["encoder_subtype"] == "convnet_dqn"
    for device in ("cpu", "cuda"):
        assert find_preset("envpool:Pong-v5", device, APPO()) == find_preset("ALE/Pong-v5", device, APPO())
    assert find_preset("envpool:Ant-v5", "cpu", APPO()) == find_preset("Ant-v5", "cpu", APPO())
    assert find_preset("envpool:CartPole-v1", "cpu", APPO()) == find_preset("CartPole-v1", "cpu", APPO())
    assert (
        find_preset("envpool:CartpoleSwingup-v1", "cpu", APPO())
        == find_preset("dm_control/cartpole-swingup-v0", "cpu", APPO())
        != {}
    )
    changed = find_preset("Ant-v5", "cpu", APPO())
    changed["batch_size"] = 1
    assert find_preset("Ant-v5", "cpu", APPO())["batch_size"] == 256


# ---- evaluation


def test_a_config_file_may_name_the_preset_by_its_alias(tmp_path: Path) -> None:
    """The algorithm is chosen by the same preset as all other flags."""
    (tmp_path / "a.toml").write_text('env="CartPole-v1"\nalgo="auto"\npresets="sample_efficient"\n')
    words = [f"--config={tmp_path / 'a.toml'}"]
    assert parse_train(words).run.algo == parse_train([*words, "--normalize_advantages=off"]).run.algo == "PPO"


def test_rewards_of_0_are_refused() -> None:
    assert error_of("--env=CartPole-v1", "--reward_scale=0").startswith("--reward_scale=0 makes every reward 0")


def test_evaluation_flags() -> None:
    (config,) = parse("enjoy", ["--env=CartPole-v1", "--no_render", "--max_num_episodes=3", "--json"])
    assert (config.no_render, config.max_num_episodes, config.json, config.device) == (True, 3, True, "cpu")
    assert not parse("enjoy", ["--render"])[0].no_render
    assert not parse("enjoy", ["--no_render=False"])[0].no_render
    assert parse("enjoy", ["--experiment=../x"])[0].experiment == "../x"  # a path leads to a run, too


def test_the_newest_run_is_found() -> None:
    for index, (name, env) in enumerate([("b", "CartPole-v1"), ("a", "CartPole-v1"), ("c", "Acrobot-v1")]):
        path = save(parse_train([f"--env={env}", f"--experiment={name}"]))
        os.utime(path, (index, index))
    damaged = Path("train_dir/d/config.json")
    damaged.parent.mkdir()
    damaged.write_text("{")
    os.utime(damaged, (1, 1))
    closed = Path("train_dir/e/config.json")
    closed.parent.mkdir()
    closed.symlink_to("x" * 300)  # cannot be looked at, as a run that may not be entered
    group = Path("train_dir")
    assert folder.newest_run(group, "CartPole-v1") == group / "a"
    assert folder.newest_run(group, "") == group / "c"
    for place, env in ((group, "Pong"), (Path("nowhere"), "")):
        with pytest.raises(UsageError, match="train one first"):
            folder.newest_run(place, env)


# ---- files


def test_json_is_replaced_in_one_step_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("x.json")
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(path, {"a": float("nan")})

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_json_atomic(path, {"a": 2})
    assert read_mapping(path) == {"a": 1}
    assert os.listdir() == ["x.json"]


def test_a_file_that_the_user_has_named_is_replaced_when_it_is_whole() -> None:
    path = Path("x.txt")
    for text in ("old", "new"):
        with replaced_when_whole(path) as temporary:
            temporary.write_text(text)
    with pytest.raises(UnicodeEncodeError), replaced_when_whole(path) as temporary:
        temporary.write_text("half \udcff", encoding="utf-8")
    assert path.read_text() == "new"
    assert os.listdir() == ["x.txt"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "Is a directory"),
        ("..", "Is a directory"),
        ("/", "Is a directory"),
        ("x.txt/y", "Not a directory"),
        ("missing/y", "No such file or directory"),
        ("y" * 256, "File name too long"),
    ],
)
def test_a_place_for_no_file_is_one_line(name: str, reason: str) -> None:
    Path("x.txt").touch()
    with pytest.raises(UsageError, match=f"^cannot write .*: {reason}$"), replaced_when_whole(Path(name)) as temporary:
        temporary.write_text("")
    assert os.listdir() == ["x.txt"]


def test_lines_of_json_are_appended() -> None:
    append_json_line(Path("x.jsonl"), {"a": "1\n2"})
    append_json_line(Path("x.jsonl"), {"a": 2})
    assert [json.loads(line) for line in Path("x.jsonl").read_text().splitlines()] == [{"a": "1\n2"}, {"a": 2}]


# ---- fuzz


WORD = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["--", "-", "=", "--=", "-1", "--help=1", "-1e-3", "none", "True", "[", '{"a":1}',
                     "a=b", "\0", "\udcff"]),
    st.builds(
        lambda prefix, name, rest: f"{prefix}{name}{rest}",
        st.sampled_from(["--", "--no_", "-"]),
        st.sampled_from(sorted(FLAGS)),
        st.one_of(st.just(""), st.just("="), st.text(max_size=8).map("={}".format), st.integers().map("={}".format),
                  st.floats().map("={}".format)),
    ),
)  # fmt: skip


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(WORD, max_size=6))
def test_any_command_line_gives_typed_values_or_one_line(argv: list[str]) -> None:
    try:
        values = parse_command_line(argv, FLAGS)
    except UsageError as error:
        assert re.fullmatch(r"[^\n\r]{1,600}", str(error)), str(error)  # noqa: PT017 (both outcomes are right)
    else:
        Config.from_flat(values)


VALUES = ("0", "1", "-1", "2", "7", "64", "1e3", "1e400", "nan", "-0.5", "0.3", "none", "None", "True", "off", "auto",
          "", "a,b", "1,2", "[1]", "a=1", '{"a": [1', "APPO", "resume", "central", "linear", "CartPole-v1", "x:env",
          "../x", "x/y", "a b", "\n", "\0", "\udcff", "9" * 400, "é")  # fmt: skip


def random_command_line(rng: random.Random) -> list[str]:
    """Flags that exist and flags that nearly do, with values that fit one of them, in every spelling."""
    argv = ["--env=CartPole-v1"] * (rng.random() < 0.8)
    for _ in range(rng.randrange(8)):
        name, value = rng.choice(sorted(FLAGS)), rng.choice(VALUES)
        if rng.random() < 0.05:
            name = name[: rng.randrange(len(name))] + rng.choice("_x=- ")
        argv += rng.choice(([f"--{name}={value}"], [f"--{name}", value], [f"--{name}"], [f"--no_{name}"], [value]))
    return argv


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_command_lines_are_accepted_or_refused_in_one_line(seed: int, count: int) -> None:
    """With all sources resolved and flags checked against each other, as at the start of training and of playing."""
    rng, outcomes = random.Random(seed), Counter[str]()
    for _ in range(count):
        argv = random_command_line(rng)
        for name, read in (("train", parse_train), ("enjoy", partial(parse, "enjoy"))):
            try:
                read(argv)
            except UsageError as error:
                assert re.fullmatch(r"[^\n\r]{1,600}", str(error)), (argv, str(error))  # noqa: PT017
                outcomes[f"{name} refused"] += 1
            else:
                outcomes[f"{name} accepted"] += 1
    assert outcomes["train accepted"] > count // 20
    assert outcomes["train refused"] > count // 4


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_plain_value_of_any_flag_is_accepted_or_one_line(value: object) -> None:
    for name in FLAGS:
        try:
            Config.from_flat({name: value})
        except UsageError as error:
            assert "\n" not in str(error)  # noqa: PT017 (both outcomes are right)


TAG = st.text(st.characters(exclude_characters="\0"), min_size=1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.text(), PLAIN, max_size=3), st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1))
)
def test_words_of_a_flag_give_its_value_again(mapping: dict[str, object], tags: list[str]) -> None:
    """As the page of a run, a card and a grid write them."""
    words = [*words_of_flag("env_kwargs", mapping), *words_of_flag("wandb_tags", tags)]
    assert parse_command_line(words, FLAGS) == {"env_kwargs": mapping, "wandb_tags": tuple(tags)}
    assert parse_command_line([f"--env_kwargs={flag_text(mapping)}"], FLAGS) == {"env_kwargs": mapping}


def test_entries_of_a_mapping_add_up_and_the_last_list_wins() -> None:
    words = ["--env_kwargs", "a=1", "b=x", '--env_kwargs={"a": 2}', "--env_kwargs", "c=.5", "d=-1.", "e=1.2.3"]
    given = parse_command_line([*words, "--wandb_tags=a,b", "--wandb_tags=c"], FLAGS)
    assert given == {"env_kwargs": {"a": 2, "b": "x", "c": 0.5, "d": -1.0, "e": "1.2.3"}, "wandb_tags": ("c",)}
    assert parse_command_line(words_of_flag("env_kwargs", {"a": ".5"}), FLAGS) == {"env_kwargs": {"a": ".5"}}


def test_words_of_a_flag_are_those_that_one_types() -> None:
    assert words_of_flag("env_kwargs", {"repeat": 0.25, "name": "a b", "text": "10", "sizes": [1, {"a": None}]}) == [
        "--env_kwargs", "repeat=0.25", "name=a b", 'text="10"', 'sizes=[1, {"a": null}]'
    ]  # fmt: skip
    assert words_of_flag("wandb_tags", ["a", "m:C"]) == ["--wandb_tags=a,m:C"]
    assert words_of_flag("wandb_tags", ["a b"]) == ['--wandb_tags=["a b"]']
    assert words_of_flag("wandb_tags", ()) == ["--wandb_tags="]
    assert words_of_flag("train_dir", "x" * 200) == ["--train_dir=" + "x" * 200]
    assert words_of_flag("horizon", None) == ["--horizon=none"]


def test_shown_is_one_bounded_line() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert shown("") == "''"
    assert len(shown("x" * 1000)) == 80
