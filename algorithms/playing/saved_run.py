"""A run of before as it is played: its folder, its flags, and the files of one checkpoint."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.models.config import check_size
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.run import folder as folders
from appo.algorithms.run.config import Config
from appo.algorithms.run.trust import OF_STRANGERS, PLAYED, Reading
from appo.algorithms.runtime.best_checkpoint import load_best
from appo.algorithms.runtime.memory.state_files import decode
from appo.envs.given import is_again
from appo.utils import checkpoint_files
from appo.utils.command_line import complain
from appo.utils.errors import CheckpointError, UsageError
from appo.utils.run_folder import RunFolder
from appo.utils.values import shown

EVALUATED_METRIC = "eval/mean"
"""Metric by which the best checkpoint by evaluation is chosen."""

MISSING = {
    "latest": "checkpoint of policy {} yet",
    "best": "best checkpoint of policy {} yet: one is kept after --save_best_after env steps of training",
    "best_evaluated": "evaluated checkpoint of policy {} yet: --eval_every_sec or appo evaluate keeps one",
    "past": "past version of policy {} yet: --self_play keeps some",
    "milestone": "milestone of policy {} yet: one is kept every --save_milestones_sec seconds of training",
}


class SavedRun(NamedTuple):
    """A run and one of its checkpoints, read and verified.

    Attributes:
        folder: of the run.
        config: its flags, as they were read once.
        checkpoint: where it is.
        files: of the checkpoint, verified.
        policy: whose it is.
        refusal: the line that refuses to make the environment of these flags; empty: it may be made.
        limit: of the size of another of its checkpoints.
    """

    folder: RunFolder
    config: Config
    checkpoint: Path
    files: dict[str, bytes]
    policy: int = 0
    refusal: str = ""
    limit: checkpoint_files.Limit | None = OF_STRANGERS

    @property
    def directory(self) -> Path:
        """Path of the run's folder."""
        return self.folder.path


def find_run(config: EvaluationConfig) -> SavedRun:
    """Load the run that the flags name, or the newest one of their environment.

    Raises:
        UsageError, CheckpointError: as `load_run`, or there is no run at all.
    """
    group = Path(config.train_dir, config.experiments_root)
    named = config.experiment
    directory = folders.find_run(named, group) if named else folders.newest_run(group, config.env)
    return load_run(RunFolder(directory), config)


def load_run(folder: RunFolder, config: EvaluationConfig, needed: Collection[str] = PLAYED) -> SavedRun:
    """Load the flags of a run, and the checkpoint that `config` asks for.

    Args:
        folder: of the run.
        config: which of its policies and checkpoints; and whether the user trusts it.
        needed: flags of the run that the caller uses, see `run/trust.py`.

    Raises:
        UsageError: there is no such run, policy or milestone, or what it needs is not to be trusted.
        CheckpointError: there is no such checkpoint, or none of them verifies.
    """
    given, closed = ("env",) if config.env else (), (Path(config.train_dir),)
    name = folder.path.name
    reading = Reading.of(folder.path, trust=config.trust)
    flags = reading.permitted(needed, given=given, remember=config.trust, closed=closed)
    if not flags:
        raise UsageError(f"there is no run {shown(str(folder.path))}")
    saved = Config.from_saved(flags)
    if config.env and not saved.env.env:  # it has learned from datasets, which name none
        saved = replace(saved, env=replace(saved.env, env=config.env))
    if config.env and is_again(saved.env.env, config.env):
        saved = replace(saved, env=replace(saved.env, env=config.env))
    if config.env and config.env != saved.env.env:
        raise UsageError(f"run {name} is of {shown(saved.env.env)}, not of --env={shown(config.env)}")
    if config.policy_index >= saved.sampling.num_policies:
        raise UsageError(
            f"--policy_index={config.policy_index}: run {name} has {saved.sampling.num_policies} policies, "
            "counted from 0"
        )
    check_size(saved.model)
    loaded = _load_checkpoint(folder, config, saved.run.save_best_metric, reading.limit)
    if loaded is None:
        raise CheckpointError(f"run {name} has no {MISSING[config.load_checkpoint_kind].format(config.policy_index)}")
    for _, reason in loaded.found.damaged:
        complain(f"warning: damaged checkpoint skipped: {reason}\n")
    refusal = reading.refusal(PLAYED, given)
    return SavedRun(folder, saved, loaded.found.path, loaded.files, config.policy_index, refusal, reading.limit)


def _load_checkpoint(
    folder: RunFolder, config: EvaluationConfig, best_metric: str, limit: checkpoint_files.Limit | None
) -> checkpoint_files.Loaded | None:
    """Load the checkpoint of the wanted kind: the best, or the newest up to a milestone; None if there is none."""
    kind, milestone = config.load_checkpoint_kind, config.milestone
    parent = folder.checkpoints(config.policy_index, kind)
    if kind in ("best", "best_evaluated"):
        return load_best(parent, best_metric if kind == "best" else EVALUATED_METRIC, decode, limit)
    if milestone is not None:
        first = min((step for step, _ in checkpoint_files.listed(parent)), default=0)
        if first > milestone:
            raise UsageError(f"--milestone={milestone}: the first milestone is at {first} env steps")
    return checkpoint_files.load(parent, check=decode, at_most=milestone, limit=limit)
