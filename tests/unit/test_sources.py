"""docs/sources.md has every row of the systems it speaks of, and names only what exists."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from appo.algorithms.playing.policy import Policy
from appo.algorithms.run.algorithms import ALGORITHMS, flag_table
from appo.algorithms.run.training import Training
from appo.algorithms.runtime.callbacks import Callbacks, Episode
from docs import reference
from docs.tags import meaning

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sources.md").read_text()

SOURCES = {
    "Ape-X": (
        "AsyncReplayOptimizer learning_starts buffer_size prioritized_replay prioritized_replay_alpha"
        " prioritized_replay_beta prioritized_replay_eps train_batch_size sample_batch_size num_replay_buffer_shards"
        " max_weight_sync_delay debug batch_replay add_batch replay weights td_error update_priorities LearnerThread"
        " num_samples_dropped learner_queue replay_buffers num_weight_syncs sample_throughput train_throughput timers"
        " replay_shard_0 failed-tasks stop reset per-worker-epsilon"
    ),
    "Microbatches": (
        "microbatch_size microbatch_size-<=-train_batch_size batches-larger-than-memory"
        " synchronous-sampling-until-a-microbatch-is-full gradients-per-policy sample_time_ms grad_time_ms"
        " update_time_ms opt_peak_throughput sample_peak_throughput opt_samples learner-stats step num_steps_sampled"
        " num_steps_trained"
    ),
    "The Trainer: RLlib's COMMON_CONFIG": (
        "monitor log_level on_episode_start on_episode_step on_episode_end on_sample_end on_train_result"
        " on_postprocess_traj ignore_worker_failures log_sys_usage eager no_eager_on_workers tf_session_args"
        " local_tf_session_args model lstm_use_prev_action_reward optimizer gamma lr horizon soft_horizon"
        " no_done_at_end env_config env clip_rewards clip_actions preprocessor_pref evaluation_interval"
        " evaluation_num_episodes evaluation_config num_workers num_envs_per_worker num_gpus num_gpus_per_worker"
        " num_cpus_per_worker num_cpus_for_driver custom_resources_per_worker memory object_store_memory"
        " memory_per_worker object_store_memory_per_worker sample_batch_size train_batch_size batch_mode sample_async"
        " observation_filter synchronize_filters compress_observations collect_metrics_timeout"
        " metrics_smoothing_episodes remote_worker_envs remote_env_batch_wait_ms min_iter_time_s"
        " timesteps_per_iteration seed input input_evaluation postprocess_inputs shuffle_buffer_size output"
        " output_compress_columns output_max_file_size policies policy_mapping_fn policies_to_train"
    ),
    "The Trainer: its calls": (
        "__init__ logger_creator with_common_config with_base_config _default_config _name _init train _log_result save"
        " restore __getstate__ __setstate__ compute_action get_policy get_weights set_weights _evaluate"
        " _before_evaluate export_policy_model _export_model export_policy_checkpoint collect_metrics"
        " num_healthy_workers _try_recover default_resource_request resource_help _validate_config _register_if_needed"
    ),
    "APPO: the flags": (
        "experiment_summaries_interval adam_eps adam_beta1 adam_beta2 gae_lambda rollout use_rnn rnn_type"
        " ppo_clip_ratio batch_size num_batches_per_iteration ppo_epochs max_grad_norm exploration_loss_coeff"
        " exploration_loss num_policies policy_workers_per_policy max_policy_lag decorrelate_envs_on_one_worker"
        " with_vtrace vtrace_rho vtrace_c set_workers_cpu_affinity force_envs_single_thread default_niceness"
        " sampler_only ppo_clip_value value_loss_coeff with_pbt pbt_mix_policies_in_one_env pbt_period_env_steps"
        " pbt_start_mutation pbt_replace_fraction pbt_mutation_rate pbt_replace_reward_gap"
        " pbt_replace_reward_gap_absolute pbt_optimize_batch_size pbt_target_objective num_workers num_envs_per_worker"
        " worker_num_splits learner_main_loop_num_cores recurrence num_minibatches_to_accumulate"
        " min_traj_buffers_per_worker decorrelate_experience_max_seconds reset_timeout_seconds"
        " train_in_background_thread actor_worker_gpus use_spectral_norm benchmark"
    ),
    "APPO: the behaviours": (
        "booleans lists temporary-environment shared-buffers queues init_subset max_parallel_init"
        " progress-of-initialization order-of-processes process_report print_stats policy_lag _sample_throughput"
        " summaries master_process_memory_mb summaries-per-policy EXTRA_EPISODIC_STATS_PROCESSING"
        " EXTRA_PER_POLICY_SUMMARIES cfg.json git-diff done train_for_env_steps train_for_seconds KeyboardInterrupt"
        " FAILURE stray-children ExperimentStatus PopulationBasedTraining create_actor_worker sampler_only"
    ),
    "A3C": (
        "gradients-on-rollout-workers apply-as-they-come grads_per_step at-least-one-remote-worker wait_timer"
        " apply_timer dispatch_timer num_steps_sampled"
    ),
}
"""Part of the page, by the beginning of its title -> names there; a hyphen stands for a blank."""

CALLS = {"Training": Training, "Policy": Policy, "Callbacks": Callbacks, "Episode": Episode}
KEYWORDS = {"report_seconds", "report_env_steps"}
"""Of `Training`, which rows name without it."""


def part(title: str) -> list[list[str]]:
    """The cells of the rows of a part of the page."""
    (text,) = (text for text in PAGE.split("\n## ")[1:] if text.startswith(title))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


ROWS = [row for title in SOURCES for row in part(title)]


@cache
def names_in(path: str) -> set[str]:
    body = ast.parse((ROOT / "tests" / path).read_text()).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("title", SOURCES)
def test_every_row_is_there_once_and_in_order(title: str) -> None:
    names = [name.replace(" ", "-") for cells in part(title) for name in re.findall(r"`([^`]+)`", cells[0])]
    assert names == SOURCES[title].split()


def test_sample_factory_has_its_51_flags() -> None:
    assert len(set(SOURCES["APPO: the flags"].split())) == 51


def test_a_row_has_a_test_or_a_reason() -> None:
    assert len(ROWS) > 150
    for there, here, how, *shown in ROWS:
        assert here in ("yes", "n/a", "not yet"), there
        assert len(how) > 5, there
        assert (here == "yes") == bool(shown and re.fullmatch(r"`[\w/]+\.py::test_\w+`", shown[0])), there


def test_the_page_has_no_other_parts() -> None:
    titles = [text.partition("\n")[0] for text in PAGE.split("\n## ")[1:]]
    assert [title for title in titles if not title.startswith(tuple(SOURCES))] == []
    assert len(titles) == len(SOURCES)


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 100
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def test_every_flag_that_is_named_exists() -> None:
    ours = {name for algo in ALGORITHMS for name in flag_table(algo).flags}
    ours |= {name for flags in reference.flags_of_tools().values() for name in flags}
    named = set(re.findall(r"--(\w+)", " ".join(how for _, _, how, *_ in ROWS)))
    assert len(named) > 60
    assert named - ours == set()


def test_same_name_means_the_same_name() -> None:
    ours = flag_table("APPO").flags
    same = [cells[0] for cells in part("APPO: the flags") if cells[2].startswith("same name")]
    names = [name for cell in same for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 40
    assert [name for name in names if name not in ours] == []


def test_every_call_that_is_named_exists() -> None:
    text = " ".join(how for _, _, how, *_ in ROWS)
    named = re.findall(rf"`({'|'.join(CALLS)})\.(\w+)`", text)
    assert len(named) > 20
    assert [
        f"{kind}.{name}"
        for kind, name in named
        if not hasattr(CALLS[kind], name) and name not in Episode.__dataclass_fields__
    ] == []
    keywords = set(re.findall(r"`(\w+)` of `Training`", text))
    assert keywords == KEYWORDS
    assert Training.__init__.__kwdefaults__.keys() >= KEYWORDS


def test_every_figure_that_is_named_is_one_of_ours() -> None:
    text = " ".join(how for _, _, how, *_ in ROWS)
    figures = {name for name in re.findall(r"`((?:perf|train)/[\w/<>]+)`", text) if not name.endswith("/")}
    assert len(figures) > 8
    assert {name for name in figures if meaning(filled(name)) is None} == set()


def filled(name: str) -> str:
    """A name of a figure with examples in the place of what is in angle brackets."""
    for placeholder, example in {"<role>": "actor", "<phase>": "env", "<number>": "0"}.items():
        name = name.replace(placeholder, example)
    return name


def test_parts_follow_each_other_by_the_systems() -> None:
    places = [PAGE.index(f"\n## {title}") for title in SOURCES]
    assert all(first < second for first, second in pairwise(places))
