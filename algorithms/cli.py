"""The `appo` console script: one sub-command per tool, each also a script of its own in the repository."""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from utils.command_line import flush_or_drop, print_and_exit, say, words_of
from utils.errors import AppoError, UsageError
from utils.values import nearest, shown


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a failure the user can act on is one line on stderr, not a traceback."""
    try:
        return command()
    except AppoError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        if error.exit_code != UsageError.exit_code:
            cause = traceback.format_exception(error.__cause__) if error.__cause__ else ()
            sys.stderr.write(error.traceback or "".join(cause))
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return 130
    finally:
        flush_or_drop()


def train(argv: Sequence[str]) -> int:
    """Train: the command line of `train_appo.py`, without the program's name."""
    from algorithms.appo.config import parse_train_flags, resolve

    _print_version_if_asked(argv)
    config, origins = resolve(parse_train_flags(argv))
    for line in describe(config.to_flat(), origins):
        say(line)
    from algorithms.appo.appo import train as start

    return start(config)


def enjoy(argv: Sequence[str]) -> int:
    """Play a trained policy: the command line of `enjoy_appo.py`, without the program's name."""
    from algorithms.evaluation_config import parse_enjoy

    _print_version_if_asked(argv)
    config = parse_enjoy(argv)
    from algorithms.evaluation import enjoy as start

    return start(config)


def runs(argv: Sequence[str]) -> int:
    """List the runs of a folder: the command line of `appo runs`, without the program's name."""
    from algorithms.appo.listing import list_runs, parse_runs

    _print_version_if_asked(argv)
    return list_runs(parse_runs(argv))


def replay(argv: Sequence[str]) -> int:
    """Repeat what led an environment to fail: the command line of `appo replay`, without the program's name."""
    from algorithms.replay import parse_replay
    from algorithms.replay import replay as start

    _print_version_if_asked(argv)
    return start(parse_replay(argv))


def selftest(argv: Sequence[str]) -> int:
    """Kill processes of a small run and look whether it keeps its promises: the command line of `appo selftest`."""
    from algorithms.selftest.trial import parse_selftest
    from algorithms.selftest.trial import selftest as start

    _print_version_if_asked(argv)
    return start(parse_selftest(argv))


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train a policy, or go on with a saved run"),
    "enjoy": (enjoy, "watch, measure or film a trained policy"),
    "runs": (runs, "list runs with their state, progress and best return"),
    "replay": (replay, "repeat what led an environment to fail"),
    "selftest": (selftest, "kill processes of a small run for a minute and check that nothing is lost"),
}


def main() -> int:
    """Run `appo COMMAND [flags]` and return the exit code."""
    return run_command(lambda: _dispatch(sys.argv[1:]))


def _dispatch(argv: Sequence[str]) -> int:
    _print_version_if_asked(argv[:1])
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:10}{text}" for name, (_, text) in COMMANDS.items()]
        print_and_exit("\n".join(["usage: appo COMMAND [flags]", *lines, "appo COMMAND --help lists the flags"]))
    if argv[0] not in COMMANDS:
        raise UsageError(f"unknown command {shown(argv[0])}{nearest(argv[0], COMMANDS)} ({', '.join(COMMANDS)})")
    return COMMANDS[argv[0]][0](argv[1:])


def _print_version_if_asked(argv: Sequence[str]) -> None:
    if "--version" in argv:
        try:
            print_and_exit(f"appo {version('appo')}")
        except PackageNotFoundError:
            print_and_exit("appo (not installed)")


def describe(values: Mapping[str, object], origins: Mapping[str, str]) -> list[str]:
    """Return one line per source that decided flags other than by default: which flags, with their values."""
    lines = []
    for origin in ("env preset", "saved run", "config file"):
        names = [name for name in values if origins[name] == origin]
        if origin == "saved run" and names:
            lines.append(f"saved run: {len(names)} flags as before")
        elif names:
            lines.append(f"{origin}: {' '.join(f'{name}={words_of(values[name])}' for name in names)}")
    return lines
