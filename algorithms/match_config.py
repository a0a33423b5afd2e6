"""What can be said on the command line of match; torch-free, so that its help is quick."""

from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.appo.runs import check_folders
from utils.command_line import format_help, named_first_word, parse_command_line, print_and_exit, wants_help
from utils.config import flag, flags_of
from utils.errors import UsageError

USAGE = "appo match A B [flags]      for example: appo match pong_2:best pong_1 --episodes=200"
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
        print_and_exit(format_help(USAGE, {"Match": flags}, {}))
    first, *rest = named_first_word(argv, "a") or [""]
    words = [first, *named_first_word(rest, "b")] if first.startswith("--a=") else list(argv)
    config = MatchConfig(**parse_command_line(words, flags))  # type: ignore[arg-type]
    if not (config.a and config.b):
        raise UsageError("appo match needs two runs, A and B: folders, or names in --train_dir")
    check_folders(config.train_dir, "", "")
    return config
