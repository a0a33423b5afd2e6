"""`appo hub` uploads a policy with a model card to the Hugging Face Hub, or downloads a policy: known files only."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.run.config import Config
from appo.algorithms.run.defaults import flags_by_preset
from appo.algorithms.run.directory.page import version_of
from appo.algorithms.run.folder import check_writable, find_run, saved_flags
from appo.algorithms.run.trust import LOOKED_AT, PLAYED, uses
from appo.algorithms.runtime.memory.plain_state import read_plain
from appo.algorithms.runtime.memory.state_files import decode
from appo.algorithms.runtime.monitor.trackers import LOCATION_FLAGS
from appo.algorithms.tools.flags import HubConfig
from appo.utils import checkpoint_files
from appo.utils.command_line import say, words_of_flag
from appo.utils.directories import replace_directory
from appo.utils.errors import CheckpointError, ResourceError, UsageError
from appo.utils.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    PAGE_FILE,
    RunFolder,
    inner_folder,
    open_in,
    replace_own,
    write_json_atomic,
)
from appo.utils.values import shown

TEXTS = (PAGE_FILE, CONFIG_FILE)
"""Files with words of the user; checkpoints contain numbers."""
ALLOWED = re.compile(
    rf"{'|'.join(map(re.escape, TEXTS))}|replay\.(mp4|gif)|{CHECKPOINTS}\d{{1,4}}/ckpt_\d{{12}}/"
    r"(MANIFEST\.json|model\.safetensors|optimizer\.safetensors|state\.json)"
)
"""Names of files to upload or download: text, JSON, safetensors and videos, which cannot run code."""
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'=,(\[])((?:/|~/|[A-Za-z]:\\)[\w.+-]+[/\\][^\s"',)\]]*)""", re.MULTILINE)
LIMIT = checkpoint_files.Limit(4 << 30, "that is no policy of any size that is shared")


def hub(config: HubConfig) -> int:
    """Upload or download a policy; return the exit code.

    Raises:
        UsageError: the run or repository is missing, or a file would reveal more than a policy.
        CheckpointError: no checkpoint is usable.
        ResourceError: the Hub cannot be reached or refuses.
    """
    if config.download:
        return _download(config)
    with tempfile.TemporaryDirectory(prefix="appo-hub-") as temporary:
        folder = Path(config.output) if config.output and not config.dry_run else Path(temporary, "bundle")
        make_bundle(config, folder)
        for name in names_in(folder):
            say(f"{(folder / name).stat().st_size:12,}  {name}")
        if config.dry_run:
            kept = f", nor kept in {shown(config.output)}" if config.output else ""
            say(f"dry run: nothing is uploaded{f' to {config.repo}' if config.repo else ''}{kept}")
        elif config.repo:
            api = _library().HfApi()
            with _reaching_the_hub():
                api.create_repo(repo_id=config.repo, exist_ok=True, private=config.private)
                api.upload_folder(
                    repo_id=config.repo,
                    folder_path=str(folder),
                    allow_patterns=names_in(folder),
                    delete_patterns=[f"{CHECKPOINTS}*", "replay.*"],  # of earlier uploads
                    commit_message="A policy trained by appo",
                )
            say(f"uploaded to https://huggingface.co/{config.repo}")
    return 0


def make_bundle(config: HubConfig, folder: Path) -> None:
    """Write the files to upload into a new folder, a run that can be played.

    Raises:
        UsageError: the folder exists, the video is missing, or a text names a folder or the machine.
        ResourceError: the checkpoint cannot be written. After any error the new folder is removed.
    """
    source, bundle = RunFolder(find_run(config.run, Path(config.train_dir))), RunFolder(folder)
    run = load_run(source, EvaluationConfig.of(config), LOOKED_AT)
    if config.video and not os.path.isfile(config.video):
        raise UsageError(f"--video={shown(config.video)}: there is no such file")
    try:
        with contextlib.ExitStack() as undo:
            folder.mkdir(parents=True)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            write_json_atomic(
                bundle.config,
                {name: value for name, value in run.config.to_flat().items() if name not in LOCATION_FLAGS},
            )
            checkpoint_files.save(bundle.checkpoints(config.policy_index), run.checkpoint.name, dict(run.files))
            if config.video:
                shutil.copyfile(config.video, folder / f"replay{Path(config.video).suffix.lower()}")
            replace_own(bundle.page, model_card(run, config).encode(errors="replace"))
            _refuse_leaks(folder)
            undo.pop_all()
    except OSError as error:
        raise UsageError(f"cannot write {shown(str(folder))}: {error.strerror}: {error.filename}") from None


def names_in(folder: Path) -> list[str]:
    """Return all files of a folder as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def model_card(run: SavedRun, config: HubConfig) -> str:
    """Return the README of a repository: metadata for the Hub, returns of the policy, commands.

    Texts of the metadata are JSON, a subset of YAML.
    """
    env, state = run.config.env.env, read_plain(run.files["state.json"])
    last = state.get("progress", {}).get("windows", {}).get("reward", ())  # of the last episodes
    returns = [float(x) for x in last if math.isfinite(x)]
    score = f"{statistics.fmean(returns):.2f} +/- {statistics.pstdev(returns):.2f}" if returns else ""
    name, policy = config.repo or f"USER/{run.directory.name}", config.policy_index
    names = ", ".join(f"`{text}`" for text in (env, run.config.model.encoder_custom) if ":" in text)
    own = f"\nIts own code is not part of this repository: {names}. It is used with `--trust` only.\n" if names else ""
    changed = (item for item in run.config.to_flat().items() if _is_told(run.config, *item))
    flags = shlex.join(word for item in changed for word in words_of_flag(*item))
    versions = " ".join(f"{package} {version_of(package) or 'unknown'}" for package in ("torch", "gymnasium", "numpy"))
    measured = f"""model-index:
- name: {run.config.algorithm.name}
  results:
  - task:
      type: reinforcement-learning
      name: reinforcement-learning
    dataset:
      name: {json.dumps(env)}
      type: {json.dumps(env)}
    metrics:
    - type: mean_reward
      value: {json.dumps(score)}
      name: mean_reward
      verified: false
"""
    last = f"{score} | the last {len(returns)} episodes of training" if returns else "not measured | |"
    given = "" if env else " --env=ID"  # a run from datasets
    return f"""---
library_name: appo
tags:
- deep-reinforcement-learning
- reinforcement-learning
{f"- {json.dumps(env)}" if env else "- offline-reinforcement-learning"}
{measured * bool(env and returns)}---
# {env or "A policy"}, learned by {run.config.algorithm.name}{"" if env else " from datasets"}
{own}
| env steps | mean return | over |
|---|---|---|
| {int(state["env_steps"]):,} | {last} |

The weights are safetensors and JSON: nothing in here is executed when it is loaded.

    appo hub --download={name}
    appo enjoy --experiment={name.rpartition("/")[2]}{given}{f" --policy_index={policy}" * bool(policy)}

In a loop of one's own:

    from appo import load_policy
    policy = load_policy("{name.rpartition("/")[2]}"{f", policy={policy}" * bool(policy)}{"" if env else ", env=ID"})
    action = policy.act(observation)

Trained with `appo train {flags}`, with python {platform.python_version()} {versions}.
"""


def _is_told(config: Config, name: str, value: object) -> bool:
    """Return whether the command on the card needs a flag: the value is no default, or a preset may change the flag."""
    default = config.table.flags[name].default
    others = flags_by_preset(config.env.env, config.algorithm, config.run.preset)
    usual = list(default) if isinstance(default, tuple) else default
    return name not in (*LOCATION_FLAGS, "experiment") and (value != usual or name in others)


def _refuse_leaks(folder: Path) -> None:
    """Refuse unknown files, and texts with the path of a folder or the name of this machine (UsageError)."""
    host = socket.gethostname()
    # A host name of letters alone may be any word, for example the name of an environment.
    machine = None if host.isalpha() else re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])")
    for name in names_in(folder):
        if not ALLOWED.fullmatch(name):
            raise UsageError(f"{shown(name)} is no file of a policy: nothing is uploaded")
        text = (folder / name).read_text(encoding="utf-8") if name in TEXTS else ""
        if found := [*ABSOLUTE_PATH.findall(text), *(machine.findall(text) if machine else ())]:
            raise UsageError(f"{name} would give away {shown(found[0])}: change that flag, nothing is uploaded")


def _download(config: HubConfig) -> int:
    """Download the known files of a policy, verify all of them, then make the run."""
    name = config.experiment or config.download.rpartition("/")[2]
    target = Path(config.train_dir, name)
    if os.path.lexists(target):
        raise UsageError(f"there is {shown(str(target))} already: give another --experiment")
    check_writable(target)
    library = _library()
    with _reaching_the_hub():
        offered = sorted(library.HfApi().list_repo_files(config.download))
    wanted = [file for file in offered if ALLOWED.fullmatch(file)]
    for file in offered:
        say(f"{'taken' if file in wanted else 'left out':9} {shown(file)}")
    if CONFIG_FILE not in wanted:
        raise UsageError(f"{config.download} holds no {CONFIG_FILE}: it is no policy of appo")
    if config.dry_run:
        return 0
    try:
        Path(config.train_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hub-", dir=target.parent) as temporary:
            folder, place = Path(temporary, target.name), Path(temporary, "fetched")
            for file in wanted:
                with _reaching_the_hub():
                    library.hf_hub_download(config.download, file, local_dir=str(place))
                _keep(place, file, folder / file)
            told = _examine(folder)
            replace_directory(folder, target)
    except OSError as error:
        raise ResourceError(f"cannot write {shown(str(target))}: {error.strerror or error}") from error
    say(f"{target}: {told}")
    return 0


def _keep(place: Path, file: str, target: Path) -> None:
    """Copy a downloaded file without following links (UsageError)."""
    try:
        *folders, name = file.split("/")
        with inner_folder(place.parent, (place.name, *folders)) as above, open_in(above, name) as source:
            if os.fstat(source.fileno()).st_size > LIMIT.num_bytes:
                raise ValueError("it is too large")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as copy:
                shutil.copyfileobj(source, copy)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{file} is no plain file of at most {LIMIT.num_bytes >> 30} GiB: {why}") from None


def _examine(folder: Path) -> str:
    """Read what playing reads; return remarks (UsageError: invalid flags; CheckpointError: a damaged checkpoint)."""
    flags = saved_flags(folder)
    if not uses(flags, LOOKED_AT):  # flags of a stranger's algorithm are unknown
        Config.from_saved(flags)
    if not (parents := RunFolder(folder).checkpoint_folders()):
        raise CheckpointError("there is no checkpoint in it")
    for parent in parents:
        checkpoint_files.load(parent, check=decode, limit=LIMIT)
    asks = ", ".join(uses(flags, PLAYED))
    trust = f"; to be played with --trust only, as it would use {asks}" * bool(asks)
    return f"a policy of {shown(flags.get('env'))}{trust}"


def _library() -> Any:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UsageError('appo hub needs the package huggingface_hub: pip install "appo[hub]"')
    return importlib.import_module("huggingface_hub")


@contextlib.contextmanager
def _reaching_the_hub() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # from the library, HTTP or the network
        raise ResourceError(f"the Hub: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
