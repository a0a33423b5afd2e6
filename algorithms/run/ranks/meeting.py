"""One run among several learners of a policy: its share of every batch, its folder, and what ranks agree on first."""

import json
import logging
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from appo.algorithms.run.algorithms import DEFAULT, flag_table, written_in
from appo.algorithms.run.config import Config, typed
from appo.algorithms.run.folder import LOCATION, check_name
from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.ranks import SHARED_GPU, Rank
from appo.utils.command_line import words_of
from appo.utils.errors import AppoError, UsageError
from appo.utils.files import read_mapping
from appo.utils.run_folder import RunFolder, append_to_own
from appo.utils.values import shown

log = logging.getLogger(__name__)

MEET_SECONDS = 120.0
"""Time in which rank 0 must have taken the folder of the run."""
OWN_FLAGS = ("seed", "train_for_seconds", *LOCATION)
"""Flags in which ranks may differ; a rank 0 that is started again has less time left."""


def given_ranks(given: Mapping[str, object], rank: Rank | None) -> dict[str, object]:
    """Return the flags of a command line, with the number of ranks of a launcher (UsageError: another number is asked).

    After a further start by torchrun, rank 0 resumes the run of the start before.
    """
    if rank is None:
        return dict(given)
    asked = given.get("num_learners") or _learners_in_file(given) or rank.size
    if asked != rank.size:
        raise UsageError(f"--num_learners={asked}: the launcher has started {rank.size} ranks")
    given = {**given, "num_learners": rank.size}
    if rank.start != "0" and rank.number == 0:  # torchrun starts all ranks again: the run goes on
        given |= {"restart_behavior": "resume"}
        starts = range(int(rank.start) - 1, -1, -1) if rank.start.isdigit() else ()
        if name := next(filter(None, (name_of_run(replace(rank, start=str(start))) for start in starts)), ""):
            given |= {"experiment": name}
    return given


def _learners_in_file(given: Mapping[str, object]) -> object:
    """Return the number of learners in the config file; None: no file, or the default, as `--print_config` writes."""
    if not (path := str(given.get("config") or "")):
        return None
    source, table = f"--config={shown(path)}", flag_table(DEFAULT)
    written = {n: x for n, x in written_in(read_mapping(Path(path)), source).items() if n == "num_learners"}
    asked = typed(written, source, table).get("num_learners")
    return None if asked == table.flags["num_learners"].default else asked


def share_of(config: Config, rank: Rank | None) -> Config:
    """Return the flags of one of several learners, whose batches together are those of the flags.

    Raises:
        UsageError: the learners cannot share a batch.
    """
    if rank is None:
        return config
    flags, size = config.learning, rank.size
    if flags.batch_size % size:
        raise UsageError(f"--batch_size={flags.batch_size} cannot be divided among --num_learners={size}")
    own: dict[str, Any] = {"batch_size": flags.batch_size // size}
    if getattr(flags, "microbatch_size", 0) >= own["batch_size"]:
        own["microbatch_size"] = 0
    for name, least in {"replay_capacity": 1, "learning_starts": 1, "max_weight_sync_delay": 0}.items():
        if hasattr(flags, name):
            own[name] = max(least, getattr(flags, name) // size)
    if "updates_per_step" in {field.name for field in fields(flags)}:
        own["updates_per_step"] = flags.updates_per_step * size  # every rank makes all updates, and a share of steps
    try:
        shared = replace(flags, **own)
        config.algorithm.check(shared, None)
    except UsageError as error:
        raise UsageError(f"--num_learners={size} divides --batch_size={flags.batch_size}, and then: {error}") from None
    return replace(config, learning=shared, run=replace(config.run, device=config.device))  # that of a whole batch


def announce(config: Config, rank: Rank, finished: str | None) -> Config:
    """Let the other ranks begin, as rank 0, which holds the folder of the run; return the flags, with a seed."""
    if config.run.seed is None:
        config = replace(config, run=replace(config.run, seed=secrets.randbits(32)))
    words = {
        "flags": _compared(config),
        "undecided": sorted(config.undecided),
        "versions": _versions(),
        "seed": config.run.seed,
        "name": config.run.experiment,
        "finished": finished,
        "who": _who(rank),
    }
    _store_of(rank).set("about", json.dumps(words))
    return config


def follow(config: Config, rank: Rank) -> tuple[Config, str | None]:
    """Wait for rank 0; return the flags of a run in a folder of its own, and the reason if nothing is left to do.

    Raises:
        UsageError: this rank has other flags or versions than rank 0.
        AppoError: rank 0 does not begin.
    """
    store, deadline = _store_of(rank), time.monotonic() + MEET_SECONDS
    while not store.check(["about"]):
        if time.monotonic() > deadline:
            raise AppoError(f"{_who(rank)}: rank 0 has not taken the folder of the run in {MEET_SECONDS:g} s")
        time.sleep(0.05)
    words = json.loads(store.get("about"))
    # A rank may read flags that rank 0 completed and saved after announcing them open, or find the opposite order.
    undecided = words["undecided"]
    config = config if undecided else _with_decided(config, words["flags"])
    compared = {name: x for name, x in _compared(config).items() if name in config.given or name not in undecided}
    for kind, dashes, mine in (("flags", "--", compared), ("versions", "", _versions())):
        others = words[kind]
        if name := next((name for name in mine if others.get(name) != mine[name]), None):
            own, first = words_of(mine[name]), words_of(others.get(name))
            raise UsageError(f"{_who(rank)} has {dashes}{name}={own}, {words['who']} has {first}: all need the same")
    check_name("experiment", str(words["name"]))
    whole = replace(config.run, experiment=str(words["name"]))
    return _in_own_folder(config, whole, rank, int(words["seed"])), words["finished"]


def name_of_run(rank: Rank) -> str:
    """Return the name of the run that rank 0 has announced; empty before."""
    store = _store_of(rank)
    return str(json.loads(store.get("about"))["name"]) if store.check(["about"]) else ""


def print_into(log_path: Path) -> int:
    """Print into a log from now on; return a descriptor of the former standard error."""
    before = os.dup(2)
    descriptor = append_to_own(log_path, make=True)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    return before


def choose_gpu(rank: Rank) -> None:
    """Let this process and its workers see one GPU of the machine, by the number of the rank."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen in ("", "-1"):  # the user hides all GPUs
        return
    # CUDA counts from 0 whatever the names: a container with a single GPU may have /dev/nvidia3 alone.
    found = [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    if gpus := seen.split(",") if seen is not None else found:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank.local % len(gpus)]
        if rank.local_size > len(gpus):
            os.environ[SHARED_GPU] = "1"


def _in_own_folder(config: Config, whole: RunConfig, rank: Rank, seed: int) -> Config:
    """Return the flags of a rank without checkpoints, evaluation, trackers and panel, in a folder below the run's."""
    path = RunFolder(whole.run_directory).rank(rank.number)
    run = replace(
        config.run,
        train_dir=str(path.parent),
        experiments_root="",
        experiment=path.name,
        restart_behavior="resume",
        init_from="",  # the weights come from rank 0
        init_whole=False,
        seed=seed,
        train_until_return=None,  # the goal is a mean return of rank 0, which ends the run of all
    )
    quiet = replace(
        config.logging,
        log_format="plain",
        tensorboard=False,
        plot=False,
        eval_every_sec=0.0,
        eval_video_every_min=0.0,
        track=(),
        with_wandb=False,
    )
    return replace(config, run=run, logging=quiet, unnamed=False)


def _with_decided(config: Config, flags: Mapping[str, object]) -> Config:
    """Return the configuration with the undecided flags as rank 0 has saved them, perhaps in an earlier start."""
    known = {name: value for name, value in flags.items() if name in config.undecided}
    decided = Config.from_flat(config.to_flat() | known)
    return replace(config, **{part: getattr(decided, part) for part in config.table.by_part}, undecided=frozenset())


def _compared(config: Config) -> dict[str, Any]:
    flags = json.loads(json.dumps(config.to_flat()))  # as the other ranks read them
    return {name: value for name, value in flags.items() if name not in OWN_FLAGS}


def _versions() -> dict[str, str]:
    from appo.algorithms.run.directory.page import version_of  # late: of no use to a single learner

    packages = ("appo", "torch", "numpy", "gymnasium")
    return {"python": platform.python_version(), **{name: version_of(name) or "not installed" for name in packages}}


def _who(rank: Rank) -> str:
    return f"rank {rank.number} (pid {os.getpid()} on {socket.gethostname()})"


def _store_of(rank: Rank) -> Any:
    from appo.algorithms.runtime.learning.rank_store import client_of  # late: a single learner needs no torch in main

    return client_of(rank, "mains")
