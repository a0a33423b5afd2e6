"""Every flag of every algorithm is read in a run, or belongs to something that is off, which is said once."""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from appo import Training
from appo.algorithms import cli
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.offline.algorithm import BC
from appo.algorithms.offline.config import CloningConfig
from appo.algorithms.run import main
from appo.algorithms.run.algorithms import ALGORITHMS, find_algorithm, flag_table
from appo.algorithms.run.config import Config, parse_train, parse_train_flags, resolve
from appo.algorithms.run.defaults import completed
from appo.algorithms.run.effects import features_of, without_effect
from appo.algorithms.runtime.config import WITHOUT_EFFECT
from appo.envs.spaces import ActionForm, Space, spec_of
from appo.utils.flags import flag
from tests.integration.runs import ROOT
from tests.unit.datasets.data import written

PLAYING = ("--num_workers=1", "--num_envs_per_worker=4", "--env_vectorization=python")
SMALL = ("--inference=serial", "--use_rnn=False", "--encoder_mlp_layers=8", "--experiment=run")
LENGTHS: Mapping[str, tuple[str, ...]] = {
    "APPO": ("--rollout=8", "--batch_size=64", "--train_for_env_steps=200"),
    "PPO": ("--rollout=8", "--batch_size=64", "--num_batches_per_iteration=1", "--train_for_env_steps=200"),
    "APEX": ("--rollout=8", "--batch_size=64", "--learning_starts=64", "--train_for_env_steps=200"),
    "SAC": ("--env=Pendulum-v1", "--batch_size=64", "--learning_starts=64", "--train_for_env_steps=100"),
    "PQN": ("--rollout=8", "--batch_size=64", "--num_batches_per_iteration=1", "--train_for_env_steps=200"),
    "BC": ("--rollout=8", "--batch_size=16", "--train_for_env_steps=50"),
    "MARWIL": ("--rollout=8", "--batch_size=16", "--train_for_env_steps=50"),
}
OF_PROCESSES = ("parts/optimizer.py", "parts/rmsprop.py", "a3c/learner.py", "a3c/config.py", "run/workers/networks.py")
"""Where A3C, which is never one process, reads its flags."""

ELSEWHERE = {
    "config": "algorithms/run/config.py",
    "init_whole": "algorithms/run/resume.py",
    "save_every_env_steps": "algorithms/run/resume.py",
    "res_w": "envs/families/vizdoom/__init__.py",
    "res_h": "envs/families/vizdoom/__init__.py",
    "input_evaluation": "algorithms/run/config.py",
    "experiment_summaries_interval": "algorithms/runtime/monitor/monitor.py",
}
"""Flags that a short run may have no use for -> where they are read."""


def named_in(path: Path) -> set[str]:
    """Names that a file reads as attributes, or as words."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


COMPREHENSIONS = {"<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>"}


def reader(depth: int) -> CodeType:
    """Code of the function that reads: up to Python 3.11, each comprehension inside has a frame of its own."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame and frame.f_back and frame.f_code.co_name in COMPREHENSIONS:
        frame = frame.f_back
    assert frame
    return frame.f_code


def spy_on(monkeypatch: pytest.MonkeyPatch, algo: str) -> set[str]:
    """Names of flags that anything reads from now on, but for what copies, compares or checks all of them."""
    table, read = flag_table(algo), set[str]()

    def spied(names: frozenset[str]) -> Any:
        def get(flags: object, name: str) -> object:
            if name in names:
                code = reader(1)
                copies = code.co_filename == "<string>" or code.co_filename.endswith("/dataclasses.py")
                if not copies and code.co_name != "to_flat" and not code.co_name.lstrip("_").startswith("check"):
                    read.add(name)
            return object.__getattribute__(flags, name)

        return get

    for part, flags in table.by_part.items():
        monkeypatch.setattr(table.parts[part], "__getattribute__", spied(frozenset(flags)), raising=False)
    return read


def off_in(config: Config, features: Mapping[str, object]) -> set[str]:
    """Names of flags that would be told to have no effect, were they given."""
    given = frozenset(config.table.flags)
    lines = list(without_effect(replace(config, given=given), features))
    return {line.split()[0].removeprefix("--") for line in lines}


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, algo: str, like: str = "") -> tuple[set[str], set[str]]:
    """Train in this process, as long as `like`; names of flags that were read, and of those that have no effect."""
    seen: list[tuple[Config, Mapping[str, object]]] = []

    def watched(config: Config, *arguments: Any, **keywords: Any) -> dict[str, object]:
        seen.append((config, features_of(config, *arguments, **keywords)))
        return dict(seen[0][1])

    monkeypatch.setattr(main, "features_of", watched)
    where = (f"--train_dir={folder}", f"--algo={algo}", *SMALL, *LENGTHS[like or algo])
    if find_algorithm(algo).needs_actors:
        where += PLAYING
        if not any(word.startswith("--env=") for word in where):
            where += ("--env=CartPole-v1",)
    else:
        where += (f"--input={folder / 'set'}",)
        written(folder / "set")
    read = spy_on(monkeypatch, algo)
    assert cli.run_command(lambda: cli.run("train", list(where))) == 0
    ((config, features),) = seen
    read = set(read)
    monkeypatch.undo()
    return read, off_in(config, features)


@pytest.mark.parametrize("algo", LENGTHS)
def test_every_flag_is_read_or_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str) -> None:
    read, off = run(monkeypatch, tmp_path, algo)
    flags = flag_table(algo).flags
    assert flags.keys() - read - off - ELSEWHERE.keys() == set()
    assert off >= flags.keys() & WITHOUT_EFFECT.keys()


@dataclass(frozen=True)
class UnreadConfig(CloningConfig):
    """Learning."""

    unread: int = flag(0, "no code reads the value")


class Unread(BC):
    name, flags = "Unread", UnreadConfig


def test_a_flag_without_a_reader_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, off = run(monkeypatch, tmp_path, f"{__name__}:Unread", like="BC")
    flags = flag_table(f"{__name__}:Unread").by_part["learning"]
    assert "batch_size" in read
    assert off.isdisjoint(flags)
    assert {name for name in flags.keys() - read if not flags[name].needs} - ELSEWHERE.keys() == {"unread"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_read_elsewhere_is_read_there(name: str) -> None:
    assert name in named_in(ROOT / ELSEWHERE[name])


def test_every_flag_of_learning_of_an_algorithm_in_processes_is_read() -> None:
    config = resolve({"env": "CartPole-v1", "algo": "A3C", "use_rnn": False})[0]
    features = features_of(config, spec_of(spaces.Box(-1, 1, (4,)), spaces.Discrete(2)), "local", remembers=False)
    read = set().union(*(named_in(ROOT / "algorithms" / name) for name in OF_PROCESSES))
    assert flag_table("A3C").by_part["learning"].keys() - read - off_in(config, features) == set()
    assert LENGTHS.keys() | {"A3C"} == ALGORITHMS.keys()


def test_actions_that_are_squashed_into_bounds_have_bounds() -> None:
    config = resolve({"env": "Pendulum-v1", "action_distribution": "tanh_gaussian"})[0]
    box, form = spaces.Box(-2.0, 2.0, (1,)), ActionForm(scaled=True, squashed=True)
    features = features_of(config, spec_of(NUMBERS, box, form=form), "local", remembers=False)
    assert (features["between"], features["bounded"]) == (True, True)


class Own(APPO):
    """An algorithm of the user's, whose loss may read any flag of learning."""


NUMBERS, PICTURE = spaces.Box(-1.0, 1.0, (4,)), spaces.Box(0, 255, (40, 40, 3), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (7, 7, 20), np.uint8)
CHOICES, REALS, UNBOUNDED = spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-np.inf, np.inf, (2,))
TWO = ("--num_policies=2", "--per_policy")
PROCESSES = "it is for runs with processes, not --inference=serial"


@pytest.mark.parametrize(
    ("words", "observation", "action", "lines"),
    [
        (["--train_in_background_thread=False"], NUMBERS, CHOICES, [
            "--train_in_background_thread has no effect: on CUDA the next batch is uploaded while training in any case"
        ]),
        ([], NUMBERS, CHOICES, []),
        (["--rnn_type=lstm"], NUMBERS, CHOICES, ["--rnn_type has no effect: it is for --use_rnn"]),
        (["--rnn_type=lstm", "--use_rnn"], NUMBERS, CHOICES, []),
        (["--recurrence=8"], NUMBERS, CHOICES, ["--recurrence has no effect: it is for networks with a memory"]),
        (["--recurrence=8", "--use_rnn"], NUMBERS, CHOICES, []),
        (["--encoder_extra_fc_layers=2"], NUMBERS, CHOICES, [
            "--encoder_extra_fc_layers has no effect: it is for environments that show images"
        ]),
        (["--encoder_extra_fc_layers=2", "--hidden_size=8"], PICTURE, CHOICES, []),
        (["--encoder_mlp_layers=8"], PICTURE, CHOICES, [
            "--encoder_mlp_layers has no effect: it is for environments that show numbers"
        ]),
        (["--hidden_size=8"], NUMBERS, CHOICES, [
            "--hidden_size has no effect: it is for environments that show images or networks with a memory"
        ]),
        (["--hidden_size=8", "--encoder_custom=a:B"], NUMBERS, CHOICES, []),
        (["--encoder_subtype=mlp_residual", "--nonlinearity=tanh", "--encoder_mlp_layers=8,8"], NUMBERS, CHOICES, [
            "--nonlinearity has no effect: it is for encoders other than mlp_residual"
        ]),
        (["--initial_stddev=2"], NUMBERS, CHOICES, [
            "--initial_stddev has no effect: it is for actions that are drawn as numbers"
        ]),
        (["--initial_stddev=2", "--clip_actions=False"], NUMBERS, REALS, []),
        (["--action_distribution=tanh_gaussian"], NUMBERS, CHOICES, [
            "--action_distribution has no effect: it is for actions between two finite bounds"
        ]),
        (["--action_distribution=tanh_gaussian", "--action_scaling=auto"], NUMBERS, UNBOUNDED, [
            "--action_distribution has no effect: it is for actions between two finite bounds",
            "--action_scaling has no effect: it is for actions with a finite bound",
        ]),
        (["--action_distribution=tanh_gaussian", "--action_scaling=auto"], NUMBERS, REALS, []),
        (["--obs_scale=2", "--normalize_input=True"], NUMBERS, CHOICES, [
            "--obs_scale has no effect: it is for environments with a single observation, not normalized by"
            " --normalize_input"
        ]),
        (["--obs_scale=2", "--obs_subtract_mean=1", "--normalize_input=False"], NUMBERS, CHOICES, []),
        (["--algo=APEX", "--max_policy_lag=3"], NUMBERS, CHOICES, [
            "--max_policy_lag has no effect: it is for algorithms that learn from new trajectories alone"
        ]),
        (["--algo=A3C", "--num_minibatches_to_accumulate=7", "--min_traj_buffers_per_worker=9"], NUMBERS, CHOICES, [
            "--min_traj_buffers_per_worker has no effect: it is for algorithms that learn from batches of several"
            " actors",
            "--num_minibatches_to_accumulate has no effect: it is for algorithms that learn from batches of several"
            " actors",
        ]),
        (["--pbt_mutation_rate=0.5"], NUMBERS, CHOICES, ["--pbt_mutation_rate has no effect: it is for --with_pbt"]),
        (["--pbt_mutation_rate=0.5", "--with_pbt", "--num_policies=2"], NUMBERS, CHOICES, []),
        ([*TWO, "gamma=0.9,0.99", "--gamma=0.5"], NUMBERS, CHOICES, [
            "--gamma has no effect: --per_policy gives every policy its own"
        ]),
        ([*TWO, "gamma=0.9,0.99", "--gamma=0.5", "--with_pbt"], NUMBERS, CHOICES, []),
        ([*TWO, "batch_size=256,512", "--batch_size=4096"], NUMBERS, CHOICES, []),  # it decides about the device
        (["--self_play_pool_size=3"], NUMBERS, CHOICES, ["--self_play_pool_size has no effect: it is for --self_play"]),
        (["--wandb_tags=a"], NUMBERS, CHOICES, ["--wandb_tags has no effect: it is for --track or --with_wandb"]),
        (["--wandb_tags=a", "--track=wandb"], NUMBERS, CHOICES, []),
        (["--eval_episodes=3"], NUMBERS, CHOICES, ["--eval_episodes has no effect: it is for --eval_every_sec"]),
        (["--output_compression=none"], NUMBERS, CHOICES, ["--output_compression has no effect: it is for --output"]),
        (["--gae_lambda=0.5"], NUMBERS, CHOICES, ["--gae_lambda has no effect: it is for --with_vtrace=False"]),
        (["--gae_lambda=0.5", "--with_vtrace=False"], NUMBERS, CHOICES, []),
        (["--vtrace_rho=2", "--with_vtrace=False"], NUMBERS, CHOICES, [
            "--vtrace_rho has no effect: it is for --with_vtrace"
        ]),
        (["--lr_adaptive_max=0.1"], NUMBERS, CHOICES, [
            "--lr_adaptive_max has no effect: it is for --lr_schedule=kl_adaptive_*"
        ]),
        (["--lr_adaptive_max=0.1", "--lr_schedule=kl_adaptive_epoch"], NUMBERS, CHOICES, []),
        (["--save_best_metric=len/mean", "--save_best_after=-1"], NUMBERS, CHOICES, [
            "--save_best_metric has no effect: it is for --save_best_after above -1"
        ]),
        (["--step_timeout_seconds=5"], NUMBERS, CHOICES, [f"--step_timeout_seconds has no effect: {PROCESSES}"]),
        (["--algo=A3C", "--adam_eps=1e-4", "--optimizer=rmsprop"], NUMBERS, CHOICES, [
            "--adam_eps has no effect: it is for --optimizer=adam"
        ]),
        (["--algo=A3C", "--rmsprop_eps=1e-4", "--optimizer=rmsprop"], NUMBERS, CHOICES, []),
        (["--algo=APEX", "--burn_in=4"], NUMBERS, CHOICES, ["--burn_in has no effect: it is for --batch_replay"]),
        (["--algo=APEX", "--priority_alpha=0.5", "--prioritized_replay=False"], NUMBERS, CHOICES, [
            "--priority_alpha has no effect: it is for --prioritized_replay"
        ]),
        (["--algo=APEX", "--replay_capacity=90000", "--input=x", "--epsilon=0.1"], NUMBERS, CHOICES, [
            "--epsilon has no effect: it is for algorithms that play environments",
            "--replay_capacity has no effect: it is for algorithms that play environments",
        ]),
        (["--algo=APEX", "--replay_ratio=4", "--input=x"], NUMBERS, CHOICES, [
            "--replay_ratio has no effect: it is for algorithms that play environments"
        ]),
        (["--algo=APEX", "--replay_ratio=4", "--input=sampler:0.5,x:0.5"], NUMBERS, CHOICES, []),
        (["--algo=SAC", "--updates_per_step=4", "--input=x"], NUMBERS, REALS, [
            "--updates_per_step has no effect: it is for algorithms that play environments"
        ]),
        (["--algo=SAC", "--updates_per_step=4", "--input=sampler:0.5,x:0.5"], NUMBERS, REALS, []),
        (["--algo=APEX", "--replay_compressed_share=0.5"], PICTURE, CHOICES, [
            "--replay_compressed_share has no effect: it is for --replay_compression=lz4"
        ]),
        (["--algo=APEX", "--actor_critic_share_weights=False"], NUMBERS, CHOICES, [
            "--actor_critic_share_weights has no effect: it is for networks with a critic"
        ]),
        (["--algo=SAC", "--priority_beta=0.5", "--target_entropy=-2", "--gamma=0.9"], NUMBERS, REALS, [
            "--priority_beta has no effect: it is for --prioritized_replay"
        ]),
        (["--algo=SAC", "--learn_temperature=False", "--target_entropy=-2", "--reward_scale=2"], NUMBERS, REALS, [
            "--target_entropy has no effect: it is for --learn_temperature"
        ]),
        (["--algo=PPO", "--recompute_advantages", "--ppo_epochs=1"], NUMBERS, CHOICES, [
            "--recompute_advantages has no effect: it is for --ppo_epochs above 1"
        ]),
        (["--algo=BC", "--input=x", "--gamma=0.9", "--reward_scale=2"], NUMBERS, CHOICES, [
            "--gamma has no effect: it is for algorithms that estimate returns",
            "--reward_scale has no effect: it is for algorithms that estimate returns",
        ]),
        (["--algo=MARWIL", "--input=x", "--gamma=0.9", "--reward_scale=2"], NUMBERS, CHOICES, []),
        (["--exploration_loss=symmetric_kl", "--exploration_loss_coeff=0"], NUMBERS, CHOICES, [
            "--exploration_loss has no effect: it is for --exploration_loss_coeff"
        ]),
        (
            ["--exploration_loss=symmetric_kl", "--exploration_loss_coeff=0", *TWO, "exploration_loss_coeff=0,0.01"],
            NUMBERS, CHOICES, ["--exploration_loss_coeff has no effect: --per_policy gives every policy its own"]
        ),
        (["--rnn_type=lstm", *TWO, "use_rnn=False,True"], NUMBERS, CHOICES, []),
        (["--rnn_type=lstm", *TWO, "gamma=0.9,0.99"], NUMBERS, CHOICES, [
            "--rnn_type has no effect: it is for --use_rnn"
        ]),
        (["--pbt_mix_policies_in_one_env=False", "--num_policies=2"], NUMBERS, CHOICES, [
            "--pbt_mix_policies_in_one_env has no effect: it is for environments of several agents"
        ]),
        (["--pbt_mix_policies_in_one_env=False", "--num_policies=2", "--policy_mapping=a:b"], NUMBERS, CHOICES, [
            "--pbt_mix_policies_in_one_env has no effect: it is for runs without --policy_mapping"
        ]),
        (["--set_workers_cpu_affinity=0", "--default_niceness=1", "--force_envs_single_thread=0"], NUMBERS, CHOICES, [
            f"--default_niceness has no effect: {PROCESSES}",
            f"--force_envs_single_thread has no effect: {PROCESSES}",
            f"--set_workers_cpu_affinity has no effect: {PROCESSES}",
        ]),
        (["--policy_init_gain=2", "--policy_initialization=torch_default"], NUMBERS, CHOICES, [
            "--policy_init_gain has no effect: it is for --policy_initialization=orthogonal or"
            " --policy_initialization=xavier_uniform"
        ]),
        (["--wandb_user=a", "--wandb_tags=a", "--track=mlflow"], NUMBERS, CHOICES, [
            "--wandb_user has no effect: it is for --track=wandb or --with_wandb"
        ]),
        (["--wandb_user=a", "--track=mlflow,wandb"], NUMBERS, CHOICES, []),
        (["--algo=tests.integration.test_flags_in_effect:Own", "--gae_lambda=0.5"], NUMBERS, CHOICES, []),
        (["--algo=BC", "--input=x", "--restart_workers=False", *TWO[:1], "--policy_mapping=a:b"], NUMBERS, CHOICES, [
            "--policy_mapping has no effect: it is for algorithms that play environments",
            "--restart_workers has no effect: it is for algorithms that play environments or runs with processes, not"
            " --inference=serial",
        ]),
        (["--normalize_images=False"], SMALL_IMAGE, CHOICES, []),  # no convolution reads it, yet it is one
        (["--algo=APEX", "--replay_compression=lz4"], SMALL_IMAGE, CHOICES, []),
        (["--action_scaling=off", "--continuous_as_bins=5"], NUMBERS, REALS, [
            "--action_scaling has no effect: it is for runs without --continuous_as_bins",
        ]),
        (["--algo=MARWIL", "--input=x", "--num_workers=2"], NUMBERS, CHOICES, [
            "--num_workers has no effect: it is for algorithms that play environments"
        ]),
    ],
)  # fmt: skip
def test_a_flag_of_something_that_is_off_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    observation: Space,
    action: Space,
    lines: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = parse_train_flags(["--env=my.games:Maze", *words])
    config = completed(resolve(flags)[0], spec_of(observation, action))
    features = features_of(config, spec_of(observation, action), "serial", remembers=config.model.use_rnn)
    assert sorted(without_effect(config, features)) == lines


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--policy_initialization=xavier_uniform", "--policy_init_gain=2", "--initial_stddev=2"], [
            "initial_stddev", "policy_init_gain", "policy_initialization",
        ]),
        (["--algo=SAC", "--temperature=0.5"], ["temperature"]),
        (["--algo=SAC", "--temperature=0.5", "--learn_temperature=False"], []),
    ],
)  # fmt: skip
def test_flags_of_the_first_weights_are_for_runs_that_draw_them(words: list[str], names: list[str]) -> None:
    spec = spec_of(NUMBERS, REALS)
    config = completed(resolve(parse_train_flags(["--env=my.games:Maze", *words]))[0], spec)
    assert list(without_effect(config, features_of(config, spec, "serial", remembers=False))) == []
    config = replace(config, run=replace(config.run, init_from="a"))
    lines = list(without_effect(config, features_of(config, spec, "serial", remembers=False)))
    assert [line.partition(" ")[0] for line in lines] == [f"--{name}" for name in names]
    assert all(line.endswith("runs without --init_from") for line in lines)


def test_only_what_is_given_is_told_and_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"--train_dir={tmp_path}", "--env=CartPole-v1", *SMALL, *PLAYING, *LENGTHS["APPO"]]
    told = []
    for more in ([], ["--train_in_background_thread", "--train_for_env_steps=400"], ["--train_for_env_steps=600"]):
        assert cli.run_command(lambda more=more: cli.run("train", [*words, *more])) == 0
        captured = capfd.readouterr()
        told.append((captured.out + captured.err).count("has no effect"))
    assert told == [0, 1, 0]


def test_a_configuration_of_a_command_line_gives_what_was_on_it(tmp_path: Path) -> None:
    words = ["--env=CartPole-v1", "--inference=serial", f"--train_dir={tmp_path}", "--pbt_mutation_rate=0.5"]
    spec = spec_of(NUMBERS, CHOICES)
    config = Training(parse_train(words), self_play_pool_size=3).config
    assert config.given == {"env", "inference", "train_dir", "pbt_mutation_rate", "self_play_pool_size"}
    assert list(without_effect(config, features_of(config, spec, "serial", remembers=True))) == [
        "--pbt_mutation_rate has no effect: it is for --with_pbt",
        "--self_play_pool_size has no effect: it is for --self_play",
    ]


def test_flags_of_a_file_are_told_where_they_are_not_the_default(tmp_path: Path) -> None:
    spec = spec_of(NUMBERS, CHOICES)
    file = tmp_path / "flags.toml"
    file.write_text('use_rnn = false\nrnn_type = "lstm"\n[learning]\nrecurrence = 0\n"gae-lambda" = 0.5\n')
    config = completed(resolve(parse_train_flags(["--env=my.games:Maze", f"--config={file}"]))[0], spec)
    assert list(without_effect(config, features_of(config, spec, "serial", remembers=False))) == [
        "--gae_lambda has no effect: it is for --with_vtrace=False",
        "--rnn_type has no effect: it is for --use_rnn",
    ]
