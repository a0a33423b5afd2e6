"""Names that are no flags: what other frameworks call so, slips of the fingers, dashes, and flags without a value."""

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.population.config import PopulationConfig, values_per_policy
from appo.algorithms.run.algorithms import ALGORITHMS, flag_table
from appo.algorithms.run.config import FLAGS, FLAGS_BY_PART, parse_train_flags, resolve, typed
from appo.algorithms.run.training import Training
from appo.algorithms.tools.launch import jobs_of
from appo.algorithms.tools.train import asked_format
from appo.utils.command_line import parse_command_line
from appo.utils.errors import UsageError
from appo.utils.flags import flattened
from appo.utils.values import flag_hint, nearest, synonyms
from docs.reference import FRAMEWORKS, flags_of_tools

TOOLS = {name for flags in flags_of_tools().values() for name in flags}
OURS = TOOLS.union(*(flag_table(algo).flags for algo in ALGORITHMS))
WORDS = {word: text for table in synonyms().values() for word, text in table.items()}

SAMPLE_FACTORY_2 = re.findall(
    r"\w+",
    """
actor_critic_share_weights actor_worker_gpus adam_beta1 adam_beta2 adam_eps adaptive_stddev algo async_rl
batch_size batched_sampling benchmark continuous_tanh_scale csv_folder_name decoder_mlp_layers
decorrelate_envs_on_one_worker decorrelate_experience_max_seconds default_niceness device encoder_conv_architecture
encoder_conv_mlp_layers encoder_mlp_layers enjoy_script env env_frameskip env_framestack env_gpu_actions
env_gpu_observations episode_counter eval_deterministic eval_env_frameskip experiment experiment_summaries_interval
exploration_loss exploration_loss_coeff flush_summaries_interval force_envs_single_thread fps gae_lambda gamma
heartbeat_interval heartbeat_reporting_interval hf_repository initial_stddev keep_checkpoints kl_loss_coeff
learning_rate load_checkpoint_kind log_to_file lr_adaptive_max lr_adaptive_min lr_schedule lr_schedule_kl_threshold
max_grad_norm max_num_episodes max_num_frames max_policy_lag no_render nonlinearity normalize_input
normalize_input_keys normalize_returns num_batches_per_epoch num_batches_to_accumulate num_envs_per_worker num_epochs
num_policies num_workers obs_scale obs_subtract_mean optimizer pbt_mix_policies_in_one_env pbt_mutation_rate
pbt_optimize_gamma pbt_period_env_steps pbt_perturb_max pbt_perturb_min pbt_replace_fraction pbt_replace_reward_gap
pbt_replace_reward_gap_absolute pbt_start_mutation pbt_target_objective pixel_format policy_index policy_init_gain
policy_initialization policy_workers_per_policy ppo_clip_ratio ppo_clip_value push_to_hub recurrence restart_behavior
reward_clip reward_scale rnn_num_layers rnn_size rnn_type rollout sample_env_episodes save_best_after
save_best_every_sec save_best_metric save_every_sec save_milestones_sec save_video seed serial_mode
set_workers_cpu_affinity shuffle_minibatches stats_avg summaries_use_frameskip train_dir train_for_env_steps
train_for_seconds train_script use_env_info_cache use_record_episode_statistics use_rnn value_bootstrap
value_loss_coeff video_frames video_name vtrace_c vtrace_rho wandb_dir wandb_group wandb_job_type wandb_project
wandb_tags wandb_user with_pbt with_vtrace with_wandb worker_num_splits
""",
)
"""The flags of its version 2, of training and of playing."""

RIGHT = {
    "num_epochs": "--ppo_epochs",
    "async_rl": "--num_minibatches_to_accumulate=0 (0 is synchronous, which the default is not)",
    "encoder_conv_architecture": "--encoder_subtype",
    "encoder_conv_mlp_layers": "--encoder_extra_fc_layers (it counts layers of --hidden_size units)",
    "serial_mode": "--inference=serial",
    "rnn_size": "--hidden_size",
    "video_name": "--save_video=NAME.mp4 of appo enjoy",
    "video_frames": "--max_num_frames of appo enjoy",
    "eval_deterministic": "--deterministic of appo enjoy",
    "eval_env_frameskip": "--eval_flags env_frameskip=N (in appo enjoy it is --render_action_repeat)",
    "sample_env_episodes": "--episodes of appo evaluate",
    "csv_folder_name": "--json of appo evaluate (results of evaluations are JSON)",
    "clip_range": "--ppo_clip_ratio",
    "clip_coef": "--ppo_clip_ratio",
    "clip_param": "--ppo_clip_ratio",
    "clip_range_vf": "--ppo_clip_value",
    "vf_clip_param": "--ppo_clip_value",
    "clip_vloss": "--ppo_clip_value (0 is off)",
    "lr": "--learning_rate",
    "hidden_sizes": "--encoder_mlp_layers",
    "learning_rate_schedule": "--lr_schedule",
    "num_gpus_per_worker": "--actor_worker_gpus",
    "entropy_coeff_schedule": "--exploration_loss_schedule (constant, or linear to 0)",
    "ent_coef": "--exploration_loss_coeff (--algo=SAC has --temperature)",
    "entropy_coeff": "--exploration_loss_coeff",
    "entropy_coef": "--exploration_loss_coeff",
    "vf_coef": "--value_loss_coeff",
    "vf_loss_coeff": "--value_loss_coeff",
    "resume": "--experiment (the name of a saved run resumes it)",
    "max_steps": "--train_for_env_steps (--horizon limits an episode)",
    "max_episode_steps": "--horizon",
    "save_freq": "--save_every_sec (seconds, not steps)",
    "norm_adv": "--normalize_advantages (of --algo=PPO)",
    "normalize_advantage": "--normalize_advantages (of --algo=PPO)",
    "num_envs": "--num_envs_per_worker (times --num_workers)",
    "anneal_lr": "--lr_schedule=linear",
    "total_timesteps": "--train_for_env_steps",
    "num_gpus": "--num_learners (a learner per GPU, --actor_worker_gpus are for environments)",
    "n_steps": "--rollout",
    "num_steps": "--rollout",
    "rollout_fragment_length": "--rollout",
    "num_sgd_iter": "--ppo_epochs",
    "n_epochs": "--ppo_epochs",
    "update_epochs": "--ppo_epochs",
    "num_minibatches": "--num_batches_per_iteration",
    "minibatch_size": "--batch_size",
    "lambda_": "--gae_lambda",
    "grad_clip": "--max_grad_norm",
    "num_env_runners": "--num_workers",
    "num_envs_per_env_runner": "--num_envs_per_worker",
    "net_arch": "--encoder_mlp_layers (policy and critic get one each with --actor_critic_share_weights=False)",
    "fcnet_hiddens": "--encoder_mlp_layers",
    "use_lstm": "--use_rnn (with --rnn_type=lstm)",
    "env_id": "--env",
    "env_config": "--env_kwargs",
    "cuda": "--device=cuda",
    "wandb_entity": "--wandb_user",
    "wandb_project_name": "--wandb_project",
    "exp_name": "--experiment",
    "buffer_size": "--replay_capacity (of --algo=SAC and --algo=APEX)",
    "target_network_update_freq": "--target_update_interval (of --algo=APEX)",
    "policy_mapping_fn": "--policy_mapping",
    "evaluation_interval": "--eval_every_sec (seconds, not iterations)",
    "tensorboard_log": "--tensorboard (the files lie in the folder of the run, see --train_dir)",
    "learning_rates": "--learning_rate",
    "lerning_rate": "--learning_rate",
    "learningrate": "--learning_rate",
    "gama": "--gamma",
    "gae_lamda": "--gae_lambda",
    "num_worker": "--num_workers",
    "num_policy": "--num_policies",
    "trian_dir": "--train_dir",
    "encoder_mlp_layer": "--encoder_mlp_layers",
    "no_plots": "--no_plot",
    "roll": "--rollout",
}
"""A name that is no flag of training, and what it is here."""

NONE = re.findall(
    r"\w+",
    """
decoder_mlp_layers env_gpu_actions env_gpu_observations optimizer normalize_input_keys log_to_file
flush_summaries_interval summaries_use_frameskip use_record_episode_statistics episode_counter train_script enjoy_script
wandb_dir pbt_optimize_gamma pbt_perturb_min pbt_perturb_max value_bootstrap pixel_format use_sde noisy
save_model framework cpc_forward_steps dmlab_gpus slurm_workdir
""",
)


def complaint(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        cli.run("train", ["--env=CartPole-v1", *words])
    return str(caught.value)


@pytest.mark.parametrize("typed_name", RIGHT)
def test_a_name_of_another_framework_leads_to_ours(typed_name: str) -> None:
    assert complaint(f"--{typed_name}=1") == f"unknown flag --{typed_name}; did you mean {RIGHT[typed_name]}?"


@pytest.mark.parametrize("name", NONE)
def test_a_name_that_has_no_counterpart_says_why(name: str) -> None:
    (reason,) = {text for word, text in WORDS.items() if fnmatch(name, word)}
    assert complaint(f"--{name}") == f"unknown flag --{name}; there is none here: {reason.removeprefix('none: ')}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--recompute_advantages"], "unknown flag --recompute_advantages; it is a flag of --algo=PPO"),
        (["--replay_capacity=9"], "unknown flag --replay_capacity; it is a flag of --algo=APEX, --algo=SAC"),
        (["--fps=3"], "unknown flag --fps; it is a flag of appo enjoy"),
        (["--episodes=3"], "unknown flag --episodes; it is a flag of appo evaluate, appo match"),
        (["--no-anneal-lr"], "unknown flag --no_anneal_lr; --anneal_lr would be --lr_schedule=linear"),
        (
            ["--algo=APEX", "--clip_coef=1"],
            "unknown flag --clip_coef; did you mean --ppo_clip_ratio (a flag of --algo=APPO, --algo=PPO)?",
        ),
        (
            ["--algo=PPO", "--use_gae"],
            "unknown flag --use_gae; did you mean --with_vtrace=False (--algo=PPO always has GAE; a flag of"
            " --algo=APPO)?",
        ),
        (["-learning_rate=1"], "unknown flag -learning_rate; did you mean --learning_rate?"),
        (["--autotune"], "unknown flag --autotune; did you mean --learn_temperature (of --algo=SAC)?"),
        (["--noisy"], "unknown flag --noisy; there is none here: --algo=APEX explores by --epsilon"),
        (["--device=GPU"], "--device=GPU is not one of auto, cpu, cuda; did you mean gpu?"),
        (["--decoder_type=conv"], "unknown flag --decoder_type (--help lists all)"),
        (["--vtrace_b=1"], "unknown flag --vtrace_b (--help lists all)"),
        (
            ["--lr_schedule=linear_decay"],
            "--lr_schedule=linear_decay is not one of constant, linear, kl_adaptive_minibatch, kl_adaptive_epoch;"
            " did you mean linear?",
        ),
    ],
)  # fmt: skip
def test_what_is_known_elsewhere_or_nowhere(words: Sequence[str], expected: str) -> None:
    assert complaint(*words) == expected


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("enjoy", ["--num_epochs=3"], "unknown flag --num_epochs; did you mean --ppo_epochs (a flag of appo train)?"),
        ("enjoy", ["--learning_rate=3"], "unknown flag --learning_rate; it is a flag of appo train"),
        ("enjoy", ["--video-name=x"], "unknown flag --video_name; did you mean --save_video=NAME.mp4 of appo enjoy?"),
        ("export", ["a", "--save_video"], "unknown flag --save_video; it is a flag of appo enjoy"),
        ("launch", ["--name=a", "--grid", "lr=1"], "--grid: unknown flag lr; did you mean learning_rate?"),
        ("launch", ["--name=a", "--learning_rate=1"], "unknown flag --learning_rate; it is a flag of appo train"),
        ("launch", ["--name=a", "--", "--env=a", "--lr=1"], "unknown flag --lr; did you mean --learning_rate?"),
        ("doctor", ["--clip-range=1"], "unknown flag --clip_range; did you mean --ppo_clip_ratio?"),
    ],
)  # fmt: skip
def test_every_command_asks_the_table(command: str, words: Sequence[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run(command, words)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "; did you mean learning_rate?"),
        ("learning_rates", "; did you mean learning_rate?"),
        ("anneal_lr", "; did you mean lr_schedule=linear?"),
        ("norm_adv", "; did you mean normalize_advantages (of algo=PPO)?"),
        ("recompute_advantages", "; it is a flag of algo=PPO"),
        ("wandb_dir", "; there is none here: Weights & Biases keeps its files where the variable WANDB_DIR says"),
        ("qwertz", ""),
    ],
)
def test_python_and_files_ask_the_table(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Training(env="CartPole-v1", train_dir=str(tmp_path), **{name: 1})
    assert str(caught.value) == f"flags: unknown flag {name}{hint}"
    path = tmp_path / "a.toml"
    path.write_text(f"env = 'CartPole-v1'\n{name} = 1\n")
    with pytest.raises(UsageError) as caught:
        resolve(parse_train_flags([f"--config={path}", f"--train_dir={tmp_path}"]))
    assert str(caught.value) == f"--config={path}: unknown flag {name}{hint}"


def test_the_table_names_flags_that_there_are_and_no_word_twice() -> None:
    for text in WORDS.values():
        assert set(re.findall(r"--(\w+)", text)) <= OURS, text
        assert text.startswith("none: ") or re.match(r"--\w", text), text
    for word, text in WORDS.items():
        assert word not in FLAGS
        assert {table[word] for table in synonyms().values() if word in table} == {text}


def test_the_flags_that_pages_say_to_have_the_same_name_are_ours() -> None:
    for section, (_, same, _) in FRAMEWORKS.items():
        assert set(same) <= set(FLAGS), section
        assert not set(same) & set(synonyms()[section])


@pytest.mark.parametrize("name", SAMPLE_FACTORY_2)
def test_every_flag_of_sample_factory_is_ours_or_in_the_table(name: str) -> None:
    assert name in FLAGS or name in TOOLS or name in synonyms()["sample_factory"]


def test_spelling_never_offers_another_word() -> None:
    """Every flag, were it unknown, would be answered by none of the others, but for two that a digit tells apart."""
    offered = {name: flag_hint(name, FLAGS.keys() - {name}) for name in sorted(FLAGS)}
    assert {name: hint for name, hint in offered.items() if hint} == {
        "adam_beta1": "; did you mean --adam_beta2?",
        "adam_beta2": "; did you mean --adam_beta1?",
    }


def test_nothing_that_was_typed_is_suggested() -> None:
    assert nearest("nets", ["nets", "nest"]) == "; did you mean nest?"
    assert flag_hint("seed", ["seed"]) == ""
    assert not [w for w in WORDS if re.search(rf"did you mean --{re.escape(w)}\b", flag_hint(w, OURS | {w}))]


def test_dashes_in_names_are_underscores(tmp_path: Path) -> None:
    words = [
        "--learning-rate=3e-4",
        "--no-use-rnn",
        "--save-every-sec",
        "7",
        "--experiment=a-b",
        "--env-kwargs",
        "x-y=1",
    ]
    expected = {
        "learning_rate": 3e-4, "use_rnn": False, "save_every_sec": 7, "experiment": "a-b", "env_kwargs": {"x-y": 1},
    }  # fmt: skip
    assert parse_command_line(words, FLAGS) == parse_train_flags(words) == expected
    assert parse_train_flags(
        ["--train-dir", str(tmp_path), "--restart-behavior=restart", "--target-kl=1", "--algo=PPO"]
    )
    assert cli.parse("enjoy", ["--train-dir=a-b", "--no-render"])[0].train_dir == "a-b"
    assert cli.parse("doctor", ["--batch-size=64"])[1] == {"batch_size": 64}
    assert asked_format(["--print-config=json", "--env=a"]) == ("json", ["--env=a"])
    launch, rest = cli.parse(
        "launch", ["--name=a-b", "--dry-run", "--grid", "batch-size=64,128", "--", "--env=CartPole-v1"]
    )
    assert [job.words[2] for job in jobs_of(launch, rest)] == ["--batch_size=64", "--batch_size=128"]
    config = PopulationConfig(per_policy={"learning-rate": "1,2"})
    assert values_per_policy(config, FLAGS, 2) == [{"learning_rate": 1.0}, {"learning_rate": 2.0}]
    flat = flattened({"learning": {"batch-size": 64}, "env-kwargs": {"a-b": 1}}, FLAGS_BY_PART, "config")
    assert typed(flat, "config", flag_table("APPO")) == {"batch_size": 64, "env_kwargs": {"a-b": 1}}
    with pytest.raises(UsageError, match="config: batch_size is there twice"):
        flattened({"batch-size": 64, "batch_size": 64}, FLAGS_BY_PART, "config")
    with pytest.raises(UsageError, match="train_dir is decided by appo launch"):
        cli.parse("launch", ["--name=a", "--grid", "train-dir=a,b", "--", "--env=CartPole-v1"])


WITHOUT_VALUE = {
    "track": "wandb, trackio or mlflow",
    "callbacks": "words separated by commas",
    "wandb_tags": "words separated by commas",
    "env_kwargs": "key=value words",
    "actor_worker_gpus": "whole numbers separated by commas",
    "encoder_mlp_layers": "whole numbers separated by commas",
    "eval_flags": "key=value words",
}


@pytest.mark.parametrize("name", WITHOUT_VALUE)
def test_a_list_without_a_value_is_refused(name: str) -> None:
    assert complaint(f"--{name}") == f"--{name} needs a value: {WITHOUT_VALUE[name]}"
    assert complaint(f"--{name}", "--seed=1") == f"--{name} needs a value: {WITHOUT_VALUE[name]}"


def test_tools_refuse_lists_without_a_value_too() -> None:
    for command, word, noun in (
        ("estimate", "--estimators", "is, wis, fitted_q or dr"),
        ("launch", "--seeds", "whole numbers separated by commas"),
        ("enjoy", "--callbacks", "words separated by commas"),
    ):
        with pytest.raises(UsageError) as caught:
            cli.run(command, [word])
        assert str(caught.value) == f"{word} needs a value: {noun}"


def test_an_empty_list_can_be_asked_for() -> None:
    lists = [name for name, flag in FLAGS.items() if flag.kind in ("ints", "strs")]
    for empty in ("", "none", "[]"):
        assert parse_command_line([f"--{name}={empty}" for name in lists], FLAGS) == dict.fromkeys(lists, ())
    whole = {name: [] if name in lists else {} for name, flag in FLAGS.items() if flag.kind in ("ints", "strs", "dict")}
    assert typed(whole, "config", flag_table("APPO")) == {name: () if name in lists else {} for name in whole}
