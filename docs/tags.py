"""The meanings of all figures in metrics.jsonl and TensorBoard, from which `docs.reference` makes docs/metrics.md.

A part in angle brackets stands for several names.
"""

import re

from appo.algorithms.replay.config import OF_SHARDS, REPLAY_METRICS
from appo.algorithms.run.algorithms import ALGORITHMS, find_algorithm
from appo.algorithms.runtime.roles import ROLES

Section = dict[str, str]


def of_learners() -> Section:
    """Return the meanings of the metrics of all algorithms, with the algorithms unless all share the meaning."""
    found: dict[str, dict[str, list[str]]] = {}
    for algo in ALGORITHMS:
        for name, text in find_algorithm(algo).metrics.items():
            found.setdefault(name, {}).setdefault(text, []).append(f"`{algo}`")
    return {
        f"train/{name}": "; ".join(
            text if len(algos) == len(ALGORITHMS) else f"{text} ({', '.join(algos)})" for text, algos in texts.items()
        )
        for name, texts in found.items()
    }


SECTIONS: dict[str, Section] = {
    "Counters": {
        "elapsed_seconds": "seconds of training, over all starts",
        "policy": "number of the policy of the record",
        "env_steps": "simulator frames that the policy has learned from; the x axis of TensorBoard",
        "samples": "valid steps that entered an update, each counted once; `perf/samples` in TensorBoard",
        "discarded": "steps that were too old to train on (`--max_policy_lag`); `perf/discarded` in TensorBoard",
    },
    "Episodes": {
        "reward/<kind>": "return of the last `--stats_avg` episodes as the environment gives it: `mean`, `min`, `max`",
        "reward_exploring/<kind>": "return of rows that explore much (`--algo=APEX`), which `reward` leaves out",
        "len/<kind>": "length of the episodes in env steps",
        "stats/<name>/<kind>": "numbers that the environment reports in `info` (`true_reward`, `episode_extra_stats`,"
        " `team_return` of several agents), or that `on_episode_end` of a callback returns",
    },
    "Training": of_learners(),
    "Training, every algorithm": {
        "train/skipped_in_a_row": "skipped updates since the last good update, see `--max_skipped_updates`",
        "train/rollbacks": "number of returns to the last good state",
        "train/policy_lag_mean": "updates between acting and learning, mean over samples",
        "train/policy_lag_min": "smallest policy lag",
        "train/policy_lag_max": "largest policy lag",
        "train/reproduction_error": "with `--verify_reproduction`: largest relative difference of values and logits"
        " between acting and learning; must stay below 1e-5",
        "train/reproduction_steps": "number of steps compared by `--verify_reproduction`",
        "train/replay_ratio": "uses per sample, if samples are used more than once",
    },
    "Speed": {
        "perf/env_steps_per_second": "env steps learned from per second, over ten seconds",
        "perf/samples_per_second": "samples learned from per second, over ten seconds",
        "perf/collected_per_second": "steps per second of all actors and policies, trained on or not",
        "perf/limit_samples_per_second": "speed of the machine with the environment and network if no core idled",
        "perf/limit_ratio": "samples per second of all policies together as a share of `perf/limit_samples_per_second`",
        "perf/busy_cores": "CPU time per second",
        "perf/machine_cpu_percent": "CPU time in use on the whole machine, by all programs, since the last record",
        "perf/machine_memory_percent": "memory in use on the whole machine",
        "perf/gpu<number>_percent": "time in which a GPU computes, by the number of the GPU on the machine",
        "perf/gpu<number>_memory_percent": "memory of the GPU in use",
        "perf/memory_mib": "memory of all processes, shared memory counted once; measured every 10 s at most",
        "perf/memory_main_mib": "memory of the main process, with a share of the shared memory",
        "perf/<role>/<phase>": "share of the time of a role's processes; roles and phases below",
        "perf/cpu_us/<phase>": "CPU time of one sample in microseconds, all processes together",
    },
    "Health": {
        "perf/version": "number of the newest weights; never decreases",
        "reward/episodes": "number of episodes in the mean return, at most `--stats_avg`",
        "perf/episodes": "number of episodes that the policy has ended",
        "perf/restarts": "number of restarted processes",
        "perf/actors_replaced": "actors that grew too large and were replaced (`--actor_max_growth_mb`)",
        "perf/env_rebuilds": "environments that failed and were made again (`--max_env_rebuilds`)",
        "perf/callbacks_off": "methods of callbacks that are off because they raised; only with `--callbacks`",
    },
    "Datasets": {
        "input/share": "share of the steps of batches from datasets, if `--input` mixes datasets with `sampler`",
        "output/episodes": "episodes written into the dataset of `--output` since the start",
        "output/steps": "steps in the written episodes",
        "output/parts": "complete parts of the dataset",
        "output/dropped_episodes": "episodes without an end, or without room in memory or on the disk",
        "output/dropped_steps": "steps in no episode of the dataset, including steps that actors left out",
    },
    "Several policies": {
        "pbt/<flag>": "value of the flag for the policy now",
        "pbt/reward_shaping/<name>": "coefficients of the policy's rewards",
        "pbt/copies": "number of times that the policy copied another policy",
        "pbt/copied_from": "number of the policy copied last",
        "pbt/mutations": "number of mutations of the policy",
        "pbt/objective": "objective at the last decision about any policy",
        "pbt/rank": "rank by the objective; 1 is the best",
    },
    "Replay": REPLAY_METRICS | OF_SHARDS,
    "Self-play": {
        "selfplay/rating": "strength of the policy in Elo points: the first version has 0, 400 are odds of 10 to 1",
        "selfplay/win_rate": "share of the last games won against each past version (a draw is a half), mean over"
        " the pool",
        "selfplay/win_rate_min": "share of games won against the hardest past version",
        "selfplay/pool": "past versions that may be drawn",
        "selfplay/games": "ended games against past versions, since the start",
        "selfplay/past_steps": "steps of past versions since the start, from which no policy learns",
    },
    "Evaluation": {
        "eval/<actions>_<kind>": "return in evaluations, for TensorBoard alone (`eval/results.jsonl` has the"
        " numbers): actions `sampled` or `most_probable`; `mean`, `low` and `high` end of the 95 % interval",
    },
}

PHASES = {
    "env": "steps of environments",
    "reset": "resets, if our own loop steps the environments; else part of `env`",
    "inference": "forward passes for acting",
    "training": "optimizer steps",
    "copying": "observations to the model and results back, batches out of slots, weights and states out of a learner",
    "waiting": "for actions, requests, trajectories or messages",
    "waiting_for_slots": "of actors, for a learner to give slots back",
    "framework": "all other work",
}

_PLACEHOLDERS = {
    "<kind>": "(mean|min|max|low|high)",
    "<role>": f"({'|'.join(ROLES)})",
    "<phase>": f"({'|'.join(PHASES)})",
    "<actions>": "(sampled|most_probable)",
    "<flag>": "[a-z_]+",
    "<number>": "\\d+",
    "<name>": ".+",
}


def meaning(name: str) -> str | None:
    """Return the meaning of a figure; None for an unknown figure, such as a figure of the user.

    >>> meaning("perf/cpu_us/env")
    'CPU time of one sample in microseconds, all processes together'
    """
    for section in SECTIONS.values():
        if name in section:
            return section[name]
    for section in SECTIONS.values():
        for pattern, text in section.items():
            if re.fullmatch(_expression(pattern), name):
                return text
    return None


def _expression(pattern: str) -> str:
    parts = re.split(r"(<\w+>)", pattern)
    return "".join(_PLACEHOLDERS.get(part, re.escape(part)) for part in parts)
