"""What every figure of a run means, by the name it has in metrics.jsonl and TensorBoard. docs/metrics.md is made of it.

A part in angle brackets stands for several names.
"""

import re

from appo.algorithms.apex.config import OF_SHARDS, REPLAY_METRICS
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
        "elapsed_seconds": "that the run has trained, all starts together",
        "policy": "whose record it is",
        "env_steps": "simulator frames that it has learned from; the x axis of TensorBoard",
        "samples": "valid steps that entered an update, each counted once; `perf/samples` in TensorBoard",
        "discarded": "steps that were too old to train on (`--max_policy_lag`); `perf/discarded` in TensorBoard",
    },
    "Episodes": {
        "reward/<kind>": "return of the last `--stats_avg` episodes as the environment gives it: `mean`, `min`, `max`",
        "reward_exploring/<kind>": "the same of rows that explore much (`--algo=APEX`), which `reward` then leaves out",
        "len/<kind>": "their length in env steps",
        "stats/<name>/<kind>": "what the environment reports in `info` (`true_reward`, `episode_extra_stats`,"
        " `team_return` of several agents), or `on_episode_end` of a callback returns",
    },
    "Training": of_learners(),
    "Training, every algorithm": {
        "train/skipped_in_a_row": "such updates since the last good one, see `--max_skipped_updates`",
        "train/rollbacks": "how often training went back to the last good state",
        "train/policy_lag_mean": "updates between acting and learning, mean over samples",
        "train/policy_lag_min": "the smallest",
        "train/policy_lag_max": "the largest",
        "train/reproduction_error": "with `--verify_reproduction`: largest relative difference between what acted and"
        " what learns; must stay below 1e-5",
        "train/reproduction_steps": "how many steps that compared",
        "train/replay_ratio": "uses per sample, where samples are trained on more often than once",
    },
    "Speed": {
        "perf/env_steps_per_second": "learned from, over ten seconds",
        "perf/samples_per_second": "the same in samples",
        "perf/collected_per_second": "steps that all actors have taken, for all policies together, trained on or not",
        "perf/limit_samples_per_second": "what the machine could do with this environment and network if no core were"
        " ever idle",
        "perf/limit_ratio": "how near the run is to that",
        "perf/busy_cores": "CPU time per second",
        "perf/machine_cpu_percent": "CPU time in use on the whole machine, by all programs, since the last record",
        "perf/machine_memory_percent": "memory in use on the whole machine",
        "perf/gpu<number>_percent": "time in which a GPU computes, by its number on the machine",
        "perf/gpu<number>_memory_percent": "its memory in use",
        "perf/memory_mib": "of all processes of the run, what they share counted once; looked at every 10 s at most",
        "perf/memory_main_mib": "of the main process, with its part of what it shares with others",
        "perf/<role>/<phase>": "share of the time of a role's processes; roles and phases below",
        "perf/cpu_us/<phase>": "CPU time of one sample in microseconds, all processes together",
    },
    "Health": {
        "perf/version": "number of the newest weights; never decreases",
        "perf/episodes": "that the policy has ended",
        "perf/restarts": "processes that were started again",
        "perf/actors_replaced": "actors that grew too large and were replaced (`--actor_max_growth_mb`)",
        "perf/env_rebuilds": "environments that failed and were made again (`--max_env_rebuilds`)",
        "perf/callbacks_off": "methods of callbacks that are off because they raised; only with `--callbacks`",
    },
    "Datasets": {
        "input/share": "of the steps of batches that are read from datasets, where `--input` mixes them with `sampler`",
        "output/episodes": "written into the dataset of `--output` in this start",
        "output/steps": "in them",
        "output/parts": "of the dataset that are whole",
        "output/dropped_episodes": "that had no end, or for which there was no room or no disk",
        "output/dropped_steps": "that are in no episode of the dataset, those included that actors had to leave out",
    },
    "Several policies": {
        "pbt/<flag>": "what the policy learns with now",
        "pbt/reward_shaping/<name>": "coefficients of its rewards",
        "pbt/copies": "how often it copied another policy",
        "pbt/copied_from": "whom last",
        "pbt/mutations": "how often it mutated",
        "pbt/objective": "at the last decision about any policy",
        "pbt/rank": "the same; 1 is the best",
    },
    "Replay": REPLAY_METRICS | OF_SHARDS,
    "Self-play": {
        "selfplay/rating": "strength of the policy in Elo points: its first version has 0, 400 are odds of 10 to 1",
        "selfplay/win_rate": "share of the last games that it has won against each past version (a draw is a half),"
        " mean over the pool",
        "selfplay/win_rate_min": "the same against the hardest",
        "selfplay/pool": "past versions that may be drawn",
        "selfplay/games": "games against past versions that have ended, in this start",
        "selfplay/past_steps": "steps that past versions have taken in this start, from which nobody learns",
    },
    "Evaluation": {
        "eval/<actions>_<kind>": "return in evaluations, for TensorBoard alone (`eval/results.jsonl` has the"
        " numbers): actions `sampled` or `most_probable`; `mean`, `low` and `high` end of its 95 % interval",
    },
}

PHASES = {
    "env": "steps of environments",
    "reset": "resets, where our own loop steps them; else they are part of `env`",
    "inference": "forward passes for acting",
    "training": "optimizer steps",
    "copying": "observations to the model and results back, batches out of slots, weights and states out of a learner",
    "waiting": "for actions, requests, trajectories or messages",
    "waiting_for_slots": "of actors, for a learner to give slots back",
    "framework": "everything else",
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
    """What a figure means; None for one that is not known here, such as one of the user's own.

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
