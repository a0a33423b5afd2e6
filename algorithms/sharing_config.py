"""What can be said on the command lines of export and hub; torch-free, so that their help is quick."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.appo.runs import check_folders
from algorithms.evaluation_config import CHECKPOINT_KINDS
from utils.command_line import format_help, named_first_word, parse_command_line, print_and_exit, wants_help
from utils.config import flag, flags_of
from utils.errors import UsageError
from utils.values import shown

EXPORT_USAGE = "appo export RUN [flags]      for example: appo export CartPole-v1_1 --output=policy.onnx"
HUB_USAGE = (
    "appo hub RUN --repo=USER/NAME [flags], or appo hub --download=USER/NAME"
    "      for example: appo hub CartPole-v1_1 --repo=me/cartpole --dry_run"
)
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
VIDEO_NAMES = (".mp4", ".gif")


@dataclass(frozen=True)
class ExportConfig:
    """Exporting a policy."""

    run: str = flag("", "folder of the run, or its name in train_dir; it may be the first word without a name")
    output: str = flag("policy.onnx", "file to be written; -o is the same")
    train_dir: str = flag("./train_dir", "folder of all runs")
    policy_index: int = flag(0, "which policy of the run is exported", minimum=0)
    load_checkpoint_kind: str = flag(
        "latest", "which checkpoint is exported, as that of enjoy", choices=CHECKPOINT_KINDS
    )


@dataclass(frozen=True)
class HubConfig:
    """Sharing a policy on the Hugging Face Hub."""

    run: str = flag("", "folder of the run, or its name in train_dir; it may be the first word without a name")
    repo: str = flag("", "repository to upload to, as USER/NAME; empty = only --output")
    download: str = flag("", "repository to download from, as USER/NAME, instead of uploading; empty = none")
    dry_run: bool = flag(False, "say what would be uploaded or downloaded, and do nothing")
    output: str = flag("", "folder in which to keep what is uploaded; empty = none")
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiment: str = flag("", "name of the run that a download becomes; empty = that of the repository")
    policy_index: int = flag(0, "which policy of the run is uploaded", minimum=0)
    load_checkpoint_kind: str = flag(
        "latest", "which checkpoint is uploaded, as that of enjoy", choices=CHECKPOINT_KINDS
    )
    video: str = flag("", "video to upload too, x.mp4 or x.gif, as enjoy makes them; empty = none")
    private: bool = flag(False, "make a new repository a private one")


def parse_export(argv: Sequence[str]) -> ExportConfig:
    """Return the configuration of a command line of `appo export`; `--help` prints the flags and exits."""
    flags = flags_of(ExportConfig)
    if wants_help(argv):
        print_and_exit(format_help(EXPORT_USAGE, {"Export": flags}, {}))
    words = ["--output" if word == "-o" else word for word in named_first_word(argv, "run")]
    config = ExportConfig(**parse_command_line(words, flags))  # type: ignore[arg-type]
    if not config.run:
        raise UsageError("appo export needs a run: its folder, or its name in --train_dir")
    check_folders(config.train_dir, "", "")
    return config


def parse_hub(argv: Sequence[str]) -> HubConfig:
    """Return the configuration of a command line of `appo hub`; `--help` prints the flags and exits."""
    flags = flags_of(HubConfig)
    if wants_help(argv):
        print_and_exit(format_help(HUB_USAGE, {"Hub": flags}, {}))
    config = HubConfig(**parse_command_line(named_first_word(argv, "run"), flags))  # type: ignore[arg-type]
    if bool(config.run) == bool(config.download):
        raise UsageError("appo hub needs either a run to upload or --download=USER/NAME")
    if config.run and not (config.repo or config.output or config.dry_run):
        raise UsageError("appo hub needs --repo=USER/NAME, --output=FOLDER or --dry_run")
    for name in ("repo", "download"):
        if (value := getattr(config, name)) and not REPO.fullmatch(value):
            raise UsageError(f"--{name}={shown(value)} is no name of a repository: USER/NAME")
    if config.video and not config.video.lower().endswith(VIDEO_NAMES):
        raise UsageError(f"--video={shown(config.video)}: the name must end in {' or '.join(VIDEO_NAMES)}")
    check_folders(config.train_dir, "", config.experiment)
    return config
