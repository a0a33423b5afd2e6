"""A saved run to be played: folder, flags, and files of a checkpoint."""

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
    """A run and a checkpoint of the run, read and verified.

    Attributes:
        folder: folder of the run.
        config: flags of the run.
        checkpoint: folder of the checkpoint.
        files: verified files of the checkpoint.
        policy: number of the policy of the checkpoint.
        refusal: line that refuses to make the environment of the flags; empty: the environment may be made.
        limit: limit of the size of further checkpoints.
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
        """Return the path of the run's folder."""
        return self.folder.path


def find_run(config: EvaluationConfig) -> SavedRun:
    """Load the run named by the flags, or the newest run of the environment (UsageError: no run). See `load_run`."""
    group, named = Path(config.train_dir, config.experiments_root), config.experiment
    directory = folders.find_run(named, group) if named else folders.newest_run(group, config.env)
    return load_run(RunFolder(directory), config)


def load_run(folder: RunFolder, config: EvaluationConfig, needed: Collection[str] = PLAYED) -> SavedRun:
    """Load the flags of a run, and the checkpoint chosen by `config`.

    Args:
        folder: folder of the run.
        config: choice of policy and checkpoint, and whether the user trusts the run.
        needed: flags of the run used by the caller, see `run/trust.py`.

    Raises:
        UsageError: the run, policy or milestone is missing, or needed flags are not trusted.
        CheckpointError: the checkpoint is missing, or no checkpoint verifies.
    """
    given, name = ("env",) if config.env else (), folder.path.name
    reading = Reading.of(folder.path, trust=config.trust)
    flags = reading.permitted(needed, given=given, remember=config.trust, closed=(Path(config.train_dir),))
    if not flags:
        raise UsageError(f"there is no run {shown(str(folder.path))}")
    saved = Config.from_saved(flags)
    # A run that has learned from datasets has no environment.
    if config.env and (not saved.env.env or is_again(saved.env.env, config.env)):
        saved = replace(saved, env=replace(saved.env, env=config.env))
    if config.env and config.env != saved.env.env:
        raise UsageError(f"run {name} is of {shown(saved.env.env)}, not of --env={shown(config.env)}")
    if config.policy_index >= saved.sampling.num_policies:
        raise UsageError(
            f"policy {config.policy_index}: run {name} has {saved.sampling.num_policies} policies, counted from 0"
        )
    check_size(saved.model_of(config.policy_index))
    if (loaded := _load_checkpoint(folder, config, saved.run.save_best_metric, reading.limit)) is None:
        raise CheckpointError(f"run {name} has no {MISSING[config.load_checkpoint_kind].format(config.policy_index)}")
    for _, reason in loaded.found.damaged:
        complain(f"warning: damaged checkpoint skipped: {reason}\n")
    refusal = reading.refusal(PLAYED, given)
    return SavedRun(folder, saved, loaded.found.path, loaded.files, config.policy_index, refusal, reading.limit)


def _load_checkpoint(
    folder: RunFolder, config: EvaluationConfig, best_metric: str, limit: checkpoint_files.Limit | None
) -> checkpoint_files.Loaded | None:
    """Load the best checkpoint, or the newest checkpoint up to a milestone; None without a checkpoint."""
    kind, milestone = config.load_checkpoint_kind, config.milestone
    parent = folder.checkpoints(config.policy_index, kind)
    if kind in ("best", "best_evaluated"):
        return load_best(parent, best_metric if kind == "best" else EVALUATED_METRIC, decode, limit)
    if milestone is not None:
        first = min((step for step, _ in checkpoint_files.listed(parent)), default=0)
        if first > milestone:
            raise UsageError(f"--milestone={milestone}: the first milestone is at {first} env steps")
    return checkpoint_files.load(parent, check=decode, at_most=milestone, limit=limit)
