"""What can be said on the command lines of export and hub; torch-free, so that their help is quick."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.playing.config import CHECKPOINT_KINDS
from algorithms.run.folder import check_folders
from algorithms.runtime.config import LoggingConfig
from utils.command_line import format_help, named_first_word, parse_command_line, print_and_exit, wants_help
from utils.errors import UsageError
from utils.flags import flag, flags_of, same_flag
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


# What can be said on the command line of evaluate; torch-free, so that its help is quick.


EVALUATE_USAGE = "appo evaluate RUN [flags]      for example: appo evaluate CartPole-v1_1 --episodes=100"


@dataclass(frozen=True)
class EvaluatorConfig:
    """Evaluating checkpoints."""

    run: str = flag("", "folder of the run, or its name in train_dir; it may be the first word without a name")
    train_dir: str = flag("./train_dir", "folder of all runs")
    every_sec: float = same_flag(
        LoggingConfig,
        "eval_every_sec",
        "go on while the run is trained: seconds between looks for a newer checkpoint, at the lowest priority, more"
        " where that would take over 1.5 % of the cores; 0 = evaluate the newest one and end",
    )
    episodes: int = same_flag(LoggingConfig, "eval_episodes")
    video_every_min: float = same_flag(LoggingConfig, "eval_video_every_min")
    max_num_frames: int = flag(0, "stop each of both after this many env steps (frames); 0 = no limit", minimum=0)
    seed: int = same_flag(LoggingConfig, "eval_seed")
    env_kwargs: dict[str, object] = same_flag(LoggingConfig, "eval_env_kwargs")
    best_by: str = flag(
        "sampled", "actions by which the best checkpoint is chosen", choices=("sampled", "most_probable")
    )


def parse_evaluate(argv: Sequence[str]) -> EvaluatorConfig:
    """Return the configuration of a command line of `appo evaluate`; `--help` prints the flags and exits."""
    flags = flags_of(EvaluatorConfig)
    if wants_help(argv):
        print_and_exit(format_help(EVALUATE_USAGE, {"Evaluate": flags}, {}))
    config = EvaluatorConfig(**parse_command_line(named_first_word(argv, "run"), flags))  # type: ignore[arg-type]
    if not config.run:
        raise UsageError("appo evaluate needs a run: its folder, or its name in --train_dir")
    check_folders(config.train_dir, "", "")
    return config


# What can be said on the command line of match; torch-free, so that its help is quick.


MATCH_USAGE = "appo match A B [flags]      for example: appo match pong_2:best pong_1 --episodes=200"

REFERENCE = (
    "folder of a run or its name in train_dir; with :best, :best_evaluated or :ENV_STEPS (the nearest) that checkpoint"
)


@dataclass(frozen=True)
class MatchConfig:
    """Playing two policies against each other."""

    a: str = flag("", f"{REFERENCE}; its environment is played; it may be the first word without a name")
    b: str = flag("", "the same of the other one; it may be the second word without a name")
    train_dir: str = flag("./train_dir", "folder of all runs")
    policy_a: int = flag(0, "which policy of run A plays", minimum=0)
    policy_b: int = flag(0, "which policy of run B plays", minimum=0)
    episodes: int = flag(100, "episodes of the environment; who plays which agents alternates", minimum=2)
    deterministic: bool = flag(False, "take the most probable action instead of sampling one")
    seed: int | None = flag(
        None, "seed of the episodes and the sampling; none = a random one", minimum=0, maximum=2**63 - 1
    )
    json: bool = flag(False, "print one JSON object with the results instead of text")


def parse_match(argv: Sequence[str]) -> MatchConfig:
    """Return the configuration of a command line of `appo match`; `--help` prints the flags and exits."""
    flags = flags_of(MatchConfig)
    if wants_help(argv):
        print_and_exit(format_help(MATCH_USAGE, {"Match": flags}, {}))
    first, *rest = named_first_word(argv, "a") or [""]
    words = [first, *named_first_word(rest, "b")] if first.startswith("--a=") else list(argv)
    config = MatchConfig(**parse_command_line(words, flags))  # type: ignore[arg-type]
    if not (config.a and config.b):
        raise UsageError("appo match needs two runs, A and B: folders, or names in --train_dir")
    check_folders(config.train_dir, "", "")
    return config
