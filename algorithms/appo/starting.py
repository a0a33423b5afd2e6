"""How a start deals with what earlier ones have left: it goes on with it, sets it aside, or begins with its weights."""

import contextlib
import glob
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from algorithms.appo.blueprint import SEED_BRANCHES, ModelDescription
from algorithms.appo.config import FLAGS_BY_PART, LOCATION, Config, changed_flags
from algorithms.appo.runs import CONFIG_FILE, MEASURED, find_source, saved_flags, saved_measurement
from algorithms.appo.tuning import Costs
from algorithms.runtime.best import DIRECTORY as BEST_DIRECTORY
from algorithms.runtime.best import load_best
from algorithms.runtime.checkpointing import decode, resume
from algorithms.runtime.monitor import PolicyProgress
from algorithms.runtime.plain_state import read_plain
from algorithms.runtime.runner import Budget
from algorithms.runtime.state_block import StateBlock
from algorithms.runtime.status import STATUS_FILE, read_status
from utils import checkpoint
from utils.errors import CheckpointError, ResourceError, UsageError
from utils.files import append_json_line, open_own, write_json_atomic
from utils.lock import RunLock
from utils.values import is_number, shown

log = logging.getLogger(__name__)

HISTORY_FILE = "config_history.jsonl"
LOCK_FILE = ".lock"
GROUPS = ("num_envs_per_worker", "worker_num_splits")  # which no group that is tried exceeds
SHAPES = ("rollout", "recurrence", "batch_size", "microbatch_size", "ppo_epochs", "learner_main_loop_num_cores")
COST_FLAGS = (*FLAGS_BY_PART["env"], *FLAGS_BY_PART["model"], "precision", *GROUPS, *SHAPES)
"""Flags on which the measured costs depend."""


@contextlib.contextmanager
def old_run_out_of_the_way(directory: Path, behavior: str) -> Iterator[None]:
    """Set the folder of an existing run aside, if that is asked for; its lock is held while entered.

    It comes back if no other run has begun in its place. `remove_old` removes what is to be overwritten.

    Raises:
        DirectoryInUse: another process trains in it.
        UsageError: it is no run's folder, or cannot be renamed.
    """
    if behavior == "resume" or not os.path.lexists(directory):
        yield
        return
    if not all(os.path.isfile(directory / name) for name in (STATUS_FILE, LOCK_FILE)) or directory.is_symlink():
        raise UsageError(
            f"--restart_behavior={behavior}: {shown(str(directory))} is not the folder of a run; not touched"
        )
    with RunLock(directory / LOCK_FILE):
        aside = _unused_name(directory) if behavior == "restart" else _hidden_name(directory)
        try:
            os.rename(directory, aside)
        except OSError as error:
            raise UsageError(f"cannot rename {shown(str(directory))}: {error.strerror}") from None
        if behavior == "restart":
            log.info("the old run is %s now", aside)
        try:
            yield
        finally:
            if not (directory / CONFIG_FILE).exists():
                _bring_back(aside, directory)


def _bring_back(aside: Path, directory: Path) -> None:
    """A start that fails must not cost the run that was there."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        os.rename(aside, directory)
    except OSError as error:
        log.warning("the old run is %s now, and cannot be renamed back: %s", aside, error.strerror)
    else:
        log.info("no new run has begun: %s is as it was", directory)


def remove_old(directory: Path) -> None:
    """Remove what `--restart_behavior=overwrite` has set aside, and what a crash has left of that."""
    for aside in directory.parent.glob(f".removed-{glob.escape(directory.name)}-{'[0-9a-f]' * 8}"):
        shutil.rmtree(aside, ignore_errors=True)
        log.info("the old run in %s is removed", directory)


def _unused_name(directory: Path) -> Path:
    number = 1
    while os.path.lexists(aside := directory.with_name(f"{directory.name}.bak{number}")):
        number += 1
    return aside


def _hidden_name(directory: Path) -> Path:
    """A crash while files are removed leaves no run that looks whole; see `remove_old`."""
    return directory.with_name(f".removed-{directory.name}-{secrets.token_hex(4)}")


def refuse_unwritable(directory: Path) -> None:
    """Refuse to train in a folder in which something cannot be read or written (UsageError): it is found out later."""
    folders = [directory, directory / "logs", *directory.glob("checkpoint_p*")]
    files = [path for folder in folders[:2] for path in folder.glob("*") if os.path.isfile(path)]
    needs = [*((folder, os.R_OK | os.W_OK | os.X_OK) for folder in folders), *((f, os.R_OK | os.W_OK) for f in files)]
    for path, needed in needs:
        if not os.access(path, needed):
            raise UsageError(f"cannot write the run to {shown(str(directory))}: no permission for {shown(str(path))}")


def refuse_links(directory: Path) -> None:
    """Refuse to train in a folder in which something is neither file nor folder (UsageError).

    The links of a run that came from elsewhere can lead anywhere, and what is written or pruned there is not ours.
    """
    for folder in (directory, *directory.glob("checkpoint_p*")):
        with os.scandir(folder) as entries:
            others = [e for e in entries if not (e.is_file(follow_symlinks=False) or e.is_dir(follow_symlinks=False))]
        for entry in others:
            kind = "a link" if entry.is_symlink() else "neither file nor folder"
            raise UsageError(f"{shown(entry.path)} is {kind}: what a run writes must lie in its own folder")


def finished_before(config: Config) -> str | None:
    """Why nothing is left to do for these flags; None: there is.

    A limit of seconds is one of each start, and speed is measured anew.
    """
    directory, budget = config.run.run_directory, Budget.of(config.run, config.sampling, 1)
    if config.sampling.sampler_only:
        return None
    policies = []
    for policy in range(config.sampling.num_policies):
        try:
            loaded = checkpoint.load(directory / f"checkpoint_p{policy}", check=decode)
        except CheckpointError:
            return None  # resuming says what is wrong
        if loaded is None:
            return None
        policies.append(PolicyProgress(config.logging.stats_avg, frozen=policy in config.frozen))
        policies[-1].restore(read_plain(loaded.files["state.json"]))
    if reason := budget.reached(policies):
        return reason
    # Episodes that ended while the workers stopped may have lowered a mean return that was reached.
    status = read_status(directory)
    as_before = status.get("state") == "finished" and status.get("budget") == budget.plain()
    seconds = status.get("seconds")
    in_time = as_before and isinstance(seconds, float) and seconds < budget.seconds
    return str(status.get("reason")) if in_time else None


def changes(config: Config) -> list[str]:
    """What differs from the flags of the start before, as `flag old -> new`; nothing for a new run."""
    before = saved_flags(config.run.run_directory)
    return changed_flags({name: value for name, value in before.items() if name not in LOCATION}, config.to_flat())


def journal(
    config: Config, seed: int, changed: list[str], env_steps: list[int], measured: Mapping[str, Any] | None = None
) -> None:
    """Store the flags of this start, and what has changed, at which env steps of each policy; and what was measured.

    Raises:
        ResourceError: the disk does not take it.
    """
    flat = config.to_flat() | {"seed": seed}
    directory = config.run.run_directory
    stored = flat | ({MEASURED: measured} if measured else {})
    start = {"time": time.time(), "env_steps": env_steps, "changed": changed, "flags": flat}
    try:
        write_json_atomic(directory / CONFIG_FILE, stored)
        append_json_line(directory / HISTORY_FILE, start)
    except OSError as error:
        raise ResourceError(f"cannot write the configuration to {directory}: {error.strerror}") from error
    if changed:
        log.info("changed: %s", ", ".join(changed))


def measured_before(config: Config, machine: Mapping[str, object]) -> Costs | None:
    """What an earlier start of the run has measured, if it was on such a machine and for the same work."""
    directory = config.run.run_directory
    measured, before, now = saved_measurement(directory), saved_flags(directory), config.to_flat()
    same_work = all(before.get(name) == now[name] for name in COST_FLAGS)
    if measured.get("machine") != machine or not same_work:
        return None
    try:
        return Costs.from_plain(measured["costs"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # edited, or of another version
        return None


def begun_at(directory: Path) -> float:
    """When a run began (seconds since 1970), which tells it from others of its name; 0 if its history does not say."""
    try:
        with open_own(directory / HISTORY_FILE) as history:
            begun = json.loads(history.readline())["time"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(begun) if is_number(begun) else 0.0


def seed_of_resumed(directory: Path, seed: int) -> int:
    """The seed of a start that resumes: derived from that of the run, another one each time.

    With the same one, environments would play the same episodes again after each interruption.
    """
    try:
        with open_own(directory / HISTORY_FILE) as history:
            starts = sum(1 for _ in history)
    except OSError:
        starts = 0
    seeds = np.random.SeedSequence(seed, spawn_key=(SEED_BRANCHES["start"], starts))
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)


def seed_of_leg(seed: int, env_steps: int) -> int:
    """The seed of a leg that goes on from a checkpoint at so many env steps: however many starts there were."""
    if not env_steps:
        return seed
    seeds = np.random.SeedSequence(seed, spawn_key=(SEED_BRANCHES["leg"], env_steps))
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)


def fill(
    blocks: list[StateBlock],
    config: Config,
    model: ModelDescription,
    seed: int,
    measured: Mapping[str, object] | None,
) -> list[dict[str, Any]]:
    """Put into the blocks what this start begins with, and write its flags down, as it can begin.

    An adaptive learning rate is part of the state; one that the flags change takes its place.

    Returns:
        The plain state of the checkpoint of every policy; {} where there is none.
    """
    changed = changes(config)
    rate_changed = any(change.startswith("learning_rate ") for change in changed)
    plain = {"learning_rate": config.learning.learning_rate} if rate_changed else {}
    resumed = resume(config.run.run_directory, blocks, model.table, plain)
    begin_from(config, blocks, model)
    journal(config, seed, changed, [int(state.get("env_steps", 0)) for state in resumed], measured)
    return resumed


def begin_from(config: Config, blocks: list[StateBlock], model: ModelDescription) -> None:
    """Put the weights and statistics that `--init_from` names into the blocks that hold no state; all else is new.

    Raises:
        UsageError: there is no such checkpoint, or it is of another model.
        CheckpointError: none of them can be used.
    """
    named = config.run.init_from
    blocks = [block for block in blocks if not block.writes]
    if not named or not blocks:
        return
    loaded = _load_source(find_source(named, config.run.run_directory.parent))
    try:
        state, _ = decode(loaded.files, model.table)
    except UsageError as error:
        raise UsageError(f"--init_from={shown(named)}: {error}") from None
    if state.moments.size != model.num_moments:
        found = f"{state.moments.size} running statistics, expected {model.num_moments}"
        raise UsageError(f"--init_from={shown(named)}: the checkpoint belongs to another model; it has {found}")
    vectors = state.vectors * np.array([[1], [0], [0]], np.float32)  # no moments of Adam
    for block in blocks:
        block.write(replace(state, vectors=vectors, meta=_new_counters(config.learning.learning_rate)))
    log.info("starting from the weights of %s", loaded.found.path)


def _load_source(parent: Path) -> checkpoint.Loaded:
    """The newest checkpoint of a policy, or the best in its folder of best ones."""
    if parent.name == BEST_DIRECTORY:
        loaded = load_best(parent, str(saved_flags(parent.parents[1]).get("save_best_metric")), decode)
    else:
        loaded = checkpoint.load(parent, check=decode)
    assert loaded is not None, "find_source has seen a checkpoint"
    return loaded


def _new_counters(learning_rate: float) -> dict[str, Any]:
    counters = dict.fromkeys(("version", "updates", "env_steps", "samples", "discarded"), 0)
    return {**counters, "adam_steps": 0.0, "learning_rate": learning_rate}
