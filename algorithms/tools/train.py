"""`appo train` reads a command line of training, prints the origins of flags, and starts the run."""

from collections.abc import Mapping, Sequence

from appo.algorithms.run.config import parse_train_flags, resolve
from appo.algorithms.tools.print_config import asked_format, format_flags
from appo.utils.command_line import print_and_exit, say, words_of


def train(argv: Sequence[str]) -> int:
    """Train a policy, or print the configuration for `--print_config`; return the exit code.

    Raises:
        UsageError: the command line is wrong.
        AppoError: training failed.
    """
    wanted, argv = asked_format(argv)
    config, origins = resolve(parse_train_flags(argv))
    if wanted:
        from appo.algorithms.run.defaults import ORIGIN, chosen_in
        from appo.algorithms.run.tuning.measure import resolve_defaults

        found = resolve_defaults(config)
        origins |= dict.fromkeys(chosen_in(found, config.undecided), ORIGIN)
        print_and_exit(format_flags(found, origins, wanted))
    if config.logging.log_format != "json":
        for line in describe(config.to_flat(), origins):
            say(line)
    from appo.algorithms.run.main import train as start  # late, so help is quick

    return start(config)


def describe(values: Mapping[str, object], origins: Mapping[str, str]) -> list[str]:
    """Return a line per origin other than defaults, with the flags and values from the origin."""
    lines = []
    for origin in ("env preset", "saved run", "config file"):
        names = [name for name in values if origins[name] == origin]
        if origin == "saved run" and names:
            lines.append(f"saved run: {len(names)} flags as before")
        elif names:
            lines.append(f"{origin}: {' '.join(f'{name}={words_of(values[name])}' for name in names)}")
    return lines
