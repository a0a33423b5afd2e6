"""What can be said on the command line of evaluate; torch-free, so that its help is quick."""

from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.appo.runs import check_folders
from utils.command_line import format_help, named_first_word, parse_command_line, print_and_exit, wants_help
from utils.config import flag, flags_of
from utils.errors import UsageError

USAGE = "appo evaluate RUN [flags]      for example: appo evaluate CartPole-v1_1 --episodes=100"


@dataclass(frozen=True)
class EvaluatorConfig:
    """Evaluating checkpoints."""

    run: str = flag("", "folder of the run, or its name in train_dir; it may be the first word without a name")
    train_dir: str = flag("./train_dir", "folder of all runs")
    every_sec: float = flag(
        0.0,
        "go on while the run is trained: seconds between looks for a newer checkpoint, at a priority that takes only"
        " what others leave; 0 = evaluate the newest one and end",
        minimum=0,
    )
    episodes: int = flag(
        20, "episodes of each evaluation with sampled actions, and as many with the most probable ones", minimum=2
    )
    video_every_min: float = flag(
        0.0,
        "film the first episode with the most probable actions, every so many minutes at most: mp4 in eval/videos/,"
        " named by policy and env steps; 0 = never",
        minimum=0,
    )
    max_num_frames: int = flag(0, "stop each of both after this many env steps (frames); 0 = no limit", minimum=0)
    seed: int = flag(1_000_000, "seed of the episodes, the same for every checkpoint", minimum=0, maximum=2**63 - 1)
    env_kwargs: dict[str, object] = flag({}, "arguments of the environment that differ from those of training")
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
