"""Flags of the tools, and checks of flags that contradict each other; without torch, so help is quick."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appo.algorithms.datasets.config import OutputConfig
from appo.algorithms.playing.config import CHECKPOINT_KINDS, VIDEO_SUFFIXES, EvaluationConfig
from appo.algorithms.run.config import parse_train_flags
from appo.algorithms.run.folder import check_folders, check_name
from appo.algorithms.runtime.config import LoggingConfig, RunConfig
from appo.envs.config import EnvConfig
from appo.utils.command_line import words_of
from appo.utils.errors import UsageError
from appo.utils.flags import flag, flags_of, same_flag
from appo.utils.values import shown

REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
LAUNCH_DECIDES = ("experiment", "experiments_root", "train_dir", "seed", "restart_behavior")
"""Flags of training that identify a run of a launch; users cannot give them."""
TUNE_DECIDES = (
    *LAUNCH_DECIDES, "train_for_env_steps", "train_for_seconds", "train_until_return", "env", "algo", "config", "trust",
)  # fmt: skip
"""Flags that a study cannot search; `SHARED` may be given for all its runs."""
SHARED = ("env", "algo", "config")
RUNS = "runs, or groups of runs (appo launch makes groups): names in train_dir, or paths; may be the first words"


@dataclass(frozen=True)
class RunsConfig:
    """Flags of `appo runs`."""

    runs: tuple[str, ...] = flag((), f"{RUNS}; empty = all runs, and a line for every group")
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")
    json: bool = flag(False, "print a JSON list with an object per run instead of text")


@dataclass(frozen=True)
class TopConfig:
    """Flags of `appo top`."""

    experiment: tuple[str, ...] = flag((), f"{RUNS}; empty = the last active one")
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")
    once: bool = flag(False, "print the panel once, as text, and end; the default if stdout is no terminal")
    interval_seconds: float = flag(2, "seconds between two looks", minimum=0.25)


@dataclass(frozen=True)
class CompareConfig:
    """Flags of `appo compare`."""

    runs: tuple[str, ...] = flag((), RUNS)
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")
    json: bool = flag(False, "print a JSON object instead of text")


@dataclass(frozen=True)
class PlotConfig:
    """Flags of `appo plot`."""

    runs: tuple[str, ...] = flag((), RUNS)
    output: str = flag(
        "",
        "the picture to write, also as -o FILE; its suffix is the format; empty = learning_curve.png, or with --lineage"
        " lineage.png of the run",
    )
    lineage: bool = flag(
        False, "instead of curves, print and draw who copied whom among the policies of one run, over env steps"
    )
    x: str = flag("env_steps", "axis of the curves", choices=("env_steps", "hours"))
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")


@dataclass(frozen=True)
class ReportConfig:
    """Flags of `appo report`."""

    runs: tuple[str, ...] = flag((), RUNS)
    output: str = flag("report.html", "the page to write, also as -o FILE")
    x: str = flag("env_steps", "axis of the curves at first", choices=("env_steps", "hours"))
    video_mb: int = flag(24, "MiB of videos of evaluations in the page, at most; 0 = no videos", minimum=0, maximum=500)
    train_dir: str = flag("./train_dir", "folder of all runs")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")


@dataclass(frozen=True)
class EvaluateConfig:
    """Flags of `appo evaluate`."""

    run: tuple[str, ...] = flag((), RUNS)
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    every_sec: float = same_flag(
        LoggingConfig,
        "eval_every_sec",
        "follow the run: seconds between searches for a newer checkpoint, at the lowest priority, longer if evaluations"
        " take over 1.5 % of the cores; 0 = evaluate the newest checkpoint and end",
    )
    episodes: int = same_flag(LoggingConfig, "eval_episodes")
    video_every_min: float = same_flag(LoggingConfig, "eval_video_every_min")
    max_num_frames: int = flag(0, "stop each mode after this many env steps (frames); 0 = no limit", minimum=0)
    seed: int = same_flag(LoggingConfig, "eval_seed")
    env_kwargs: dict[str, object] = same_flag(LoggingConfig, "eval_env_kwargs")
    flags: dict[str, object] = same_flag(LoggingConfig, "eval_flags")
    best_by: str = flag(
        "sampled", "actions by which the best checkpoint is chosen", choices=("sampled", "most_probable")
    )
    json: bool = flag(False, "print a JSON object per result instead of text")


REFERENCE = (
    "folder of a run or its name in train_dir; with :best, :best_evaluated or :ENV_STEPS (the nearest) that checkpoint"
)


@dataclass(frozen=True)
class MatchConfig:
    """Flags of `appo match`."""

    a: str = flag("", f"{REFERENCE}; the match is played in the environment of A; may be the first word without a name")
    b: str = flag("", "the opponent, in the same form; may be the second word without a name")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    policy_a: int = flag(0, "which policy of run A plays", minimum=0)
    policy_b: int = flag(0, "which policy of run B plays", minimum=0)
    episodes: int = flag(100, "episodes of the environment; the sides alternate", minimum=2)
    deterministic: bool = flag(False, "take the most probable action instead of sampling one")
    seed: int | None = same_flag(EvaluationConfig, "seed")
    json: bool = flag(False, "print one JSON object with the results instead of text")


@dataclass(frozen=True)
class RecordConfig(OutputConfig):
    """Flags of `appo record`."""

    run: str = flag(
        "",
        "folder of the run of the policy, or its name in train_dir; may be the first word without a name; empty"
        " = random actions in --env",
    )
    env: str = flag("", "environment of random actions, or of a run that has learned from datasets")
    env_kwargs: dict[str, object] = same_flag(EnvConfig, "env_kwargs", "arguments of the environment, beside the run's")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    policy_index: int = flag(0, "which policy of the run plays", minimum=0)
    load_checkpoint_kind: str = flag("latest", "checkpoint to play, as in appo enjoy", choices=CHECKPOINT_KINDS)
    milestone: int | None = same_flag(EvaluationConfig, "milestone")
    steps: int = flag(100_000, "steps in whole episodes, at least, after which recording ends", minimum=1)
    num_envs: int = flag(16, "environments that are played side by side", minimum=1)
    deterministic: bool = flag(
        False, "take the most probable action instead of sampling one; then no probabilities are stored"
    )
    seed: int | None = same_flag(EvaluationConfig, "seed")
    device: str = same_flag(EvaluationConfig, "device")
    json: bool = flag(False, "print one JSON object with the counts instead of text")


OF_RUNS = ("trust", "policy_index", "load_checkpoint_kind", "deterministic", "device")
"""Flags of `appo record` that random actions have no use for."""
BY_RATIOS, BY_VALUES = ("is", "wis", "dr"), ("fitted_q", "dr")
ESTIMATORS = ("is", "wis", "fitted_q", "dr")


@dataclass(frozen=True)
class EstimateConfig:
    """Flags of `appo estimate`."""

    run: str = flag("", "folder of the run whose policy is evaluated, or its name in train_dir; may be the first word")
    dataset: tuple[str, ...] = flag((), "datasets that others have played, as --input of appo train")
    estimators: tuple[str, ...] = flag(
        ESTIMATORS,
        "is = per-decision importance sampling, wis = weighted, fitted_q = fitted Q evaluation, dr = doubly robust; the"
        " last two are for actions that are one choice",
        elements="is, wis, fitted_q or dr",
    )
    gamma: float | None = flag(None, "discount per step; none = gamma of the policy", minimum=0, maximum=1)
    updates: int = flag(5_000, "optimizer steps of fitted Q evaluation", minimum=1)
    resamples: int = flag(1_000, "resamples of the episodes for intervals", minimum=1)
    seed: int = flag(0, "seed of fitted Q evaluation and of the resamples", minimum=0, maximum=2**63 - 1)
    policy_index: int = flag(0, "which policy of the run is evaluated", minimum=0)
    load_checkpoint_kind: str = flag("latest", "checkpoint to evaluate, as in appo enjoy", choices=CHECKPOINT_KINDS)
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    json: bool = flag(False, "print one JSON object with the estimates instead of text")


@dataclass(frozen=True)
class ExportConfig:
    """Flags of `appo export`."""

    run: str = flag("", "folder of the run, or its name in train_dir; may be the first word without a name")
    output: str = flag("policy.onnx", "file to be written; -o is the same")
    env: str = same_flag(EvaluationConfig, "env", "environment of a run that has learned from datasets alone")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    policy_index: int = flag(0, "which policy of the run is exported", minimum=0)
    load_checkpoint_kind: str = flag("latest", "checkpoint to export, as in appo enjoy", choices=CHECKPOINT_KINDS)


OF_UPLOADS = ("repo", "output", "trust", "policy_index", "load_checkpoint_kind", "video", "private")
"""Flags of `appo hub` that a download has no use for."""


@dataclass(frozen=True)
class HubConfig:
    """Flags of `appo hub`."""

    run: str = flag("", "folder of the run, or its name in train_dir; may be the first word without a name")
    repo: str = flag("", "repository to upload to, as USER/NAME; empty = only --output")
    download: str = flag("", "repository to download from, as USER/NAME, instead of uploading; empty = none")
    dry_run: bool = flag(False, "say what would be uploaded or downloaded, and do nothing")
    output: str = flag("", "folder in which to keep what is uploaded; empty = none")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    experiment: str = flag("", "name of the run that a download becomes; empty = name of the repository")
    policy_index: int = flag(0, "which policy of the run is uploaded", minimum=0)
    load_checkpoint_kind: str = flag("latest", "checkpoint to upload, as in appo enjoy", choices=CHECKPOINT_KINDS)
    video: str = flag("", "video to upload too, x.mp4 or x.gif, as enjoy makes them; empty = none")
    private: bool = flag(False, "make a new repository a private one")


@dataclass(frozen=True)
class LaunchConfig:
    """Flags of `appo launch`."""

    name: str = flag("", "folder in train_dir that holds the runs")
    seeds: tuple[int, ...] = flag((1,), "seeds of every setting", minimum=0)
    grid: dict[str, object] = flag(
        {}, "flags with the values to try, as flag=value,value words or flag=[JSON list]; all combinations are trained"
    )
    parallel: int = flag(1, "runs at a time", minimum=1)
    train_dir: str = flag("./train_dir", "folder of all runs")
    dry_run: bool = flag(False, "print the commands and start nothing")

    @property
    def folder(self) -> Path:
        """Return the folder of all runs of the launch."""
        return Path(self.train_dir, self.name)

    @property
    def flags_to_try(self) -> dict[str, object]:
        """Return the values to try by flag, whose names may have dashes in the grid."""
        return {name.replace("-", "_"): values for name, values in self.grid.items()}


@dataclass(frozen=True)
class TuneConfig:
    """Flags of `appo tune`. A study keeps its flags: a later start needs only the name, and may change the limits."""

    study: str = flag(
        "", "name of the study, its folder in train_dir; an existing one goes on; may be the first word without a name"
    )
    trial_env_steps: int = flag(0, "env steps of a run, after which its return counts", minimum=0)
    trial_seconds: float = flag(0.0, "seconds of a run instead of env steps", minimum=0)
    trials: int | None = flag(
        None,
        "trials of the study, over all starts; 0 = 40, or any number with tune_for_seconds; none = as before",
        minimum=0,
    )
    tune_for_seconds: float | None = flag(
        None,
        "stop searching after this many seconds of this start; 0 = no limit; none = as before",
        minimum=0,
    )
    parallel: int = flag(0, "runs at a time; 0 = cores", minimum=0)
    seeds: tuple[int, ...] = flag(
        (), "seeds of a trial, one after the other while the trial is among the best; empty = 1,2,3", minimum=0
    )
    confirm_seeds: int | None = flag(None, "new seeds with which the winner runs again; none = 3", minimum=0)
    space: str = flag(
        "",
        "JSON, TOML or YAML file that maps each flag to tune to [low, high], [low, high, log] or a list of choices;"
        " empty = a built-in space around the preset",
    )
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")

    @property
    def folder(self) -> Path:
        """Return the folder of the study."""
        return Path(self.train_dir, self.study)


@dataclass(frozen=True)
class ReplayConfig:
    """Flags of `appo replay`."""

    incident: str = flag("", "file of the incident, in incidents/ of a run; may be the first word without a name")
    trust: bool = same_flag(RunConfig, "trust")
    render: bool = flag(False, "open a window and show every step")
    hang_seconds: float = flag(
        30.0,
        "an incident that ended or stopped the process is repeated in another process, and hangs if a step, or making"
        " and resetting the environment, takes longer",
        minimum=0.1,
    )


@dataclass(frozen=True)
class DoctorConfig:
    """Flags of `appo doctor`."""

    json: bool = flag(False, "print a JSON object instead of text")


def check_location(config: Any) -> None:
    """Refuse names of folders that contain no runs (UsageError)."""
    check_folders(config.train_dir, getattr(config, "experiments_root", ""), "")


def check_estimate(config: EstimateConfig) -> None:
    """Refuse an estimate without a dataset, and unknown estimators (UsageError)."""
    check_location(config)
    if not config.dataset:
        raise UsageError("appo estimate needs --dataset=D, episodes that others have played")
    for name in config.estimators:
        if name not in ESTIMATORS:
            raise UsageError(f"--estimators={shown(name)} is none of {', '.join(ESTIMATORS)}")


def check_record(config: RecordConfig) -> None:
    """Refuse a recording without a run, an environment or a dataset to write (UsageError)."""
    check_location(config)
    config.check()
    if not config.output:
        raise UsageError("appo record needs -o DATASET, the folder that it writes")
    if not config.run and not config.env:
        raise UsageError("appo record needs a run, or --env for random actions")
    if not config.run:
        _refuse_given(config, OF_RUNS, "the policy of a run")
    if config.milestone is not None and config.load_checkpoint_kind != "milestone":
        raise UsageError(f"--milestone={config.milestone} needs --load_checkpoint_kind=milestone")


def check_hub(config: HubConfig) -> None:
    """Refuse a command line that neither uploads nor downloads, or does both, and wrong names (UsageError)."""
    if bool(config.run) == bool(config.download):
        raise UsageError("appo hub needs either a run to upload or --download=USER/NAME")
    if config.run and not (config.repo or config.output or config.dry_run):
        raise UsageError("appo hub needs --repo=USER/NAME, --output=FOLDER or --dry_run")
    for name in ("repo", "download"):
        if (value := getattr(config, name)) and not REPO.fullmatch(value):
            raise UsageError(f"--{name}={shown(value)} is no name of a repository: USER/NAME")
    if config.video and not config.video.lower().endswith(VIDEO_SUFFIXES):
        raise UsageError(f"--video={shown(config.video)}: the name must end in {' or '.join(VIDEO_SUFFIXES)}")
    check_folders(config.train_dir, "", config.experiment)
    names, others = (OF_UPLOADS, "uploads") if config.download else (("experiment",), "downloads")
    _refuse_given(config, names, others)
    if config.private and not config.repo:
        raise UsageError("--private is for a repository: give --repo=USER/NAME")


def _refuse_given(config: Any, names: Sequence[str], purpose: str) -> None:
    for name in names:
        if getattr(config, name) != flags_of(type(config))[name].default:
            raise UsageError(f"--{name} is for {purpose}: leave it out")


def check_launch(config: LaunchConfig, words: Sequence[str]) -> None:
    """Refuse a launch without a name or seeds, and flags of training chosen by the launch (UsageError)."""
    if not config.name:
        raise UsageError("appo launch needs a --name for its folder")
    check_location(config)
    check_name("name", config.name)
    if not config.seeds:
        raise UsageError("--seeds needs at least one seed")
    given = parse_train_flags(words)
    for name in (*given, *config.flags_to_try):
        if name in LAUNCH_DECIDES:
            raise UsageError(f"{name} is decided by appo launch: leave it out")
        if name in given and name in config.flags_to_try:
            raise UsageError(f"{name} is in the grid and behind it: leave it out of one of them")


def check_tune(config: TuneConfig, given: Mapping[str, object]) -> None:
    """Refuse two budgets of a run, a seed twice, and flags of training that the study decides (UsageError)."""
    check_location(config)
    check_name("study", config.study)
    if config.trial_env_steps and config.trial_seconds:
        raise UsageError("--trial_env_steps and --trial_seconds are two budgets for one run: give one of them")
    if len(set(config.seeds)) < len(config.seeds):
        raise UsageError(f"--seeds={words_of(config.seeds)} has a seed twice")
    for name in given:
        if name in TUNE_DECIDES and name not in SHARED:
            raise UsageError(f"{name} is decided by appo tune: leave it out")
