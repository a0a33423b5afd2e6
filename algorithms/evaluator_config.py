"""What can be said on the command line of evaluate; torch-free, so that its help is quick."""

from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.appo.runs import check_folders
from algorithms.runtime.config import LoggingConfig
from utils.command_line import format_help, named_first_word, parse_command_line, print_and_exit, wants_help
from utils.config import flag, flags_of, same_flag
from utils.errors import UsageError

USAGE = "appo evaluate RUN [flags]      for example: appo evaluate CartPole-v1_1 --episodes=100"


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
        print_and_exit(format_help(USAGE, {"Evaluate": flags}, {}))
    config = EvaluatorConfig(**parse_command_line(named_first_word(argv, "run"), flags))  # type: ignore[arg-type]
    if not config.run:
        raise UsageError("appo evaluate needs a run: its folder, or its name in --train_dir")
    check_folders(config.train_dir, "", "")
    return config
