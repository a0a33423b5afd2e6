"""A start resumes state and measurements of earlier starts, or begins with the weights of another run."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from appo.algorithms.run.config import FLAGS_BY_PART, Config
from appo.algorithms.run.folder import LOCATION, MEASURED, WeightSource, count_starts, find_source, journal, saved_flags
from appo.algorithms.run.plan import SEED_BRANCHES, RunPlan, seed_of
from appo.algorithms.run.trust import OF_STRANGERS, marked
from appo.algorithms.run.tuning.choice import Costs
from appo.algorithms.runtime.best_checkpoint import KEY as BEST
from appo.algorithms.runtime.best_checkpoint import load_best
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.checkpointing import resume
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import LearnerState, ModelDescription, StateBlock, StateLayout, Table
from appo.algorithms.runtime.memory.plain_state import COUNTERS, OF_MAIN, read_plain
from appo.algorithms.runtime.memory.state_files import decode
from appo.algorithms.runtime.messages import KEY as TRAITS
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.algorithms.runtime.processes.pool import Workers
from appo.utils import checkpoint_files
from appo.utils.command_line import changed_flags
from appo.utils.errors import CheckpointError, NumericsError, UsageError
from appo.utils.values import is_number, shown

log = logging.getLogger(__name__)
OF_STORED_STEPS = ("reward_scale ", "reward_clip ", "no_done_at_end ", "episodic_life ")
"""Flags with an effect on the rewards and ends of steps in a saved replay."""
COST_FLAGS = (
    *(*FLAGS_BY_PART["env"], *FLAGS_BY_PART["model"], "precision"),
    *("num_envs_per_worker", "worker_num_splits"),  # which no group that is tried exceeds
    *("rollout", "recurrence", "batch_size", "microbatch_size", "ppo_epochs", "learner_main_loop_num_cores"),
    *("updates_per_step", "replay_ratio"),
)
"""Flags that the measured costs depend on."""


def finished_before(config: Config) -> str | None:
    """Return the reason if nothing is left to do for these flags, else None.

    The limit of seconds is per start: a larger limit resumes a run. Sampling only, for its speed, always runs again.
    """
    folder, budget = config.run.folder, Budget.of(config.run, config.sampling, 1)
    if config.sampling.sampler_only:
        return None
    policies = []
    for policy in range(config.sampling.num_policies):
        try:
            limit = None if config.trusted else OF_STRANGERS
            loaded = checkpoint_files.load(folder.checkpoints(policy), check=decode, limit=limit)
        except CheckpointError:
            return None  # resuming says what is wrong
        if loaded is None:
            return None
        policies.append(PolicyProgress(config.logging.stats_avg, frozen=policy in config.frozen))
        policies[-1].restore(read_plain(loaded.files["state.json"]))
    return budget.reached(policies) or _over_by_its_status(folder.read_status(), budget)


def _over_by_its_status(status: Mapping[str, Any], budget: Budget) -> str | None:
    """Return the reason if, by the status of the last start, nothing is left to do for a budget, else None."""
    before, seconds = status.get("budget"), status.get("seconds")
    if status.get("state") != "finished" or not isinstance(before, dict) or not is_number(seconds):
        return None
    limit = before.get("seconds")
    if is_number(limit) and seconds >= limit >= budget.seconds:
        return f"{limit:g} seconds are over"
    # Episodes that ended while the workers stopped may have lowered a mean return that was reached.
    has_goal = budget.episode_return is not None and not budget.benchmark
    return str(status.get("reason")) if has_goal and before == budget.plain() and seconds < budget.seconds else None


def changes(config: Config) -> list[str]:
    """Return the flags that differ from the last start's, as `flag old -> new`; empty for a new run."""
    before = saved_flags(config.run.run_directory)
    return changed_flags({name: value for name, value in before.items() if name not in LOCATION}, config.to_flat())


def measured_before(config: Config, machine: Mapping[str, object]) -> Costs | None:
    """Return the costs that an earlier start measured on an equal machine with equal work; None without such costs."""
    before, now = config.run.folder.read_config(), config.to_flat()
    same_work = all(before.get(name) == now.get(name) for name in COST_FLAGS)  # not every algorithm has each
    try:
        measured: Any = before[MEASURED]
        return Costs.from_plain(measured["costs"]) if same_work and measured["machine"] == machine else None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # edited, or of another version
        return None


def seed_of_resumed(directory: Path, seed: int) -> int:
    """Return the seed of a resumed start, derived from the run's seed and the number of starts.

    With the run's seed, environments would repeat the same episodes after each interruption.
    """
    return seed_of(np.random.SeedSequence(seed, spawn_key=(SEED_BRANCHES["start"], count_starts(directory))))


def seed_of_segment(seed: int, env_steps: int) -> int:
    """Return the seed of the segment that begins at a checkpoint, independent of the number of starts."""
    return seed_of(np.random.SeedSequence(seed, spawn_key=(SEED_BRANCHES["leg"], env_steps))) if env_steps else seed


def fill(
    blocks: list[StateBlock],
    config: Config,
    models: Sequence[ModelDescription],
    seed: int,
    measured: Mapping[str, object] | None,
) -> list[dict[str, Any]]:
    """Fill the blocks with the state that this start begins with, then record the flags of the start.

    An adaptive learning rate is part of the state; a changed flag replaces the rate.

    Returns:
        The plain state of every policy's checkpoint; {} without a checkpoint.

    Raises:
        UsageError: rewards or ends of episodes would differ between a saved replay and new steps.
    """
    changed = changes(config)
    stored = [change for change in changed if change.startswith(OF_STORED_STEPS)]
    if stored and (kept := [path.name for path in config.run.folder.replays()]):
        of_rewards = stored[0].startswith("reward")
        why = "the rewards in its replay are scaled" if of_rewards else "its replay has the ends of episodes of before"
        raise UsageError(
            f"run {config.run.experiment} cannot change {', '.join(stored)}: {why}; give another --experiment, or"
            f" remove {', '.join(kept)} to let the replay fill again"
        )
    resumed = resume(config.run.run_directory, blocks, models, _replaced_by(changed))
    if taken := begin_from(config, blocks, models):
        resumed = [taken]
    env_steps = [int(state.get("env_steps", 0)) for state in resumed]
    journal(config.run.run_directory, marked(config.to_flat() | {"seed": seed}), changed, env_steps, measured)
    return resumed


def _replaced_by(changed: Sequence[str]) -> set[str]:
    """Return the numbers of a state that changed flags replace; another schedule begins with the rate of the flags."""
    names = {change.partition(" ")[0] for change in changed}
    return names | {"learning_rate"} if names & {"lr_schedule", "per_policy"} else names


def begin_from(config: Config, blocks: list[StateBlock], models: Sequence[ModelDescription]) -> dict[str, Any]:
    """Fill blocks without a state with weights and statistics of `--init_from`; the rest of the state is new.

    Returns:
        The plain state of the checkpoint for `--init_whole`, else {}.

    Raises:
        UsageError: the checkpoint does not exist, or belongs to a different model.
        CheckpointError: no checkpoint is usable.
    """
    named = config.run.init_from
    new = [(block, model) for block, model in zip(blocks, models, strict=True) if not block.writes]
    if not named or not new:
        return {}
    largest = max((model.limit for _, model in new), key=lambda limit: limit.num_bytes)
    source = find_source(named, config.run.run_directory.parent)
    loaded = _load_source(source, largest)
    if config.run.init_whole:
        ((block, model),) = new
        return _take_over(config, source, loaded, block, model)
    for block, model in new:
        every = model.layout.vectors
        inherited = StateLayout({name: vector for name, vector in every.items() if vector.inherited}, {})
        taken = _decoded(named, loaded, model.table, inherited, whole=False).vectors  # by whichever algorithm
        vectors = {name: taken.get(name, np.zeros(vector.shape, vector.dtype)) for name, vector in every.items()}
        block.write(LearnerState(vectors, {**dict.fromkeys(COUNTERS, 0), **model.layout.numbers}))
    log.info("starting from the weights of %s", loaded.found.path)
    return {}


def _decoded(
    named: str, loaded: checkpoint_files.Loaded, table: Table, layout: StateLayout, *, whole: bool
) -> LearnerState:
    try:
        return decode(loaded.files, table, layout, whole=whole)[0]
    except (UsageError, CheckpointError) as error:  # the file is undamaged: another algorithm has other vectors
        also = "" if whole else "; networks of the learner itself have to be there too"
        raise UsageError(f"--init_from={shown(named)}: {error}{also * isinstance(error, CheckpointError)}") from None


def _take_over(
    config: Config, source: WeightSource, loaded: checkpoint_files.Loaded, block: StateBlock, model: ModelDescription
) -> dict[str, Any]:
    """Fill the block with the whole checkpoint, like a start of the checkpoint's own run; return the plain state."""
    state = _decoded(config.run.init_from, loaded, model.table, model.layout, whole=True)
    changed = _replaced_by(changed_flags(saved_flags(source.run.path), config.to_flat()))
    meta = {name: value for name, value in state.meta.items() if name not in (TRAITS, BEST)}
    plain = {name: value for name, value in meta.items() if name not in OF_MAIN}
    anew = {name: value for name, value in model.layout.numbers.items() if name in changed}
    block.write(LearnerState(state.vectors, {**plain, **anew}))
    log.info("going on at env step %d from %s", plain["env_steps"], loaded.found.path)
    return meta


def _load_source(source: WeightSource, limit: checkpoint_files.Limit) -> checkpoint_files.Loaded:
    """Load the newest checkpoint of a policy, the best of kind `best`, or exactly the chosen one."""
    if source.env_steps is not None:
        loaded = checkpoint_files.load(source.checkpoints, check=decode, at_most=source.env_steps, limit=limit)
        if loaded is not None and loaded.found.damaged:
            raise CheckpointError(loaded.found.damaged[0].reason)
    elif source.kind == "best":
        loaded = load_best(source.checkpoints, str(saved_flags(source.run.path).get("save_best_metric")), decode, limit)
    else:
        loaded = checkpoint_files.load(source.checkpoints, check=decode, limit=limit)
    assert loaded is not None, "find_source has seen a checkpoint"
    return loaded


class ResumeSegments:
    """Divides a run of one policy at fixed numbers of env steps (`--deterministic_resume`), each with a checkpoint.

    A segment begins like a resumed start, with the learner's state alone: memory is empty, workers and environments are
    new, and all seeds follow from the run's seed and the env steps in the state. A state from disk and a state from the
    segment before therefore give the same result.

    Attributes:
        end: env steps at the end of the present segment.
    """

    def __init__(
        self, blueprint: RunPlan, arena: Arena, block: StateBlock, make_workers: Callable[[RunPlan], Workers]
    ) -> None:
        self._blueprint, self._arena, self._block, self._make_workers = blueprint, arena, block, make_workers
        self._every, self.end = blueprint.config.run.save_every_env_steps, 0

    @classmethod
    def of(cls, blueprint: RunPlan, *parts: Any) -> Self | None:
        """Divide the run of a plan if the flag asks for segments; `parts` are further arguments of the constructor."""
        return cls(blueprint, *parts) if blueprint.config.run.deterministic_resume else None

    def begin(self) -> Workers:
        """Make the workers of the segment that resumes the state in the block, not started yet."""
        env_steps = env_steps_of(self._block.read())
        self.end = (env_steps // self._every + 1) * self._every
        return self._make_workers(
            replace(self._blueprint, seed=seed_of_segment(self._blueprint.seed, env_steps), pause_env_steps=self.end)
        )

    def next(self) -> Workers:
        """Make the workers of the next segment, after the last ones ended (NumericsError: no state to resume)."""
        state = self._block.read()
        if state is None or env_steps_of(state) < self.end:
            raise NumericsError(f"the learner's state at {self.end} env steps is not finite, or was not saved")
        self._arena.clear()
        gc.collect()  # networks of the last segment, if they lived in this process
        self._block.write(state)
        return self.begin()


def env_steps_of(state: LearnerState | None) -> int:
    """Return the env steps that a state has learned from; 0 without a state."""
    return 0 if state is None else int(state.meta["env_steps"])
