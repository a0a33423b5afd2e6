"""The `appo` console script: one sub-command per tool, each also a script of its own in the repository.

Every process of a run imports this module, as multiprocessing runs the main script in each of them: so what only some
commands need is imported by them.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from utils import interrupts
from utils.command_line import flush_or_drop, print_and_exit, say, words_of
from utils.errors import AppoError, Interrupted, UsageError, without_gpu_memory
from utils.values import nearest, shown


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a failure the user can act on is one line on stderr, not a traceback."""
    with interrupts.kept():
        try:
            return command()
        except KeyboardInterrupt:
            return _interrupted()
        except Exception as error:
            if interrupts.is_behind(error):
                return _interrupted()
            told = error if isinstance(error, AppoError) else without_gpu_memory(error)
            if told is None:
                raise
            sys.stderr.write(f"error: {' '.join(str(told).split())}\n")
            if told.exit_code != UsageError.exit_code:
                cause = error if told is not error else error.__cause__
                sys.stderr.write(told.traceback or "".join(traceback.format_exception(cause) if cause else ()))
            return told.exit_code
        finally:
            flush_or_drop()


def _interrupted() -> int:
    sys.stderr.write("error: interrupted\n")
    return Interrupted.exit_code


def train(argv: Sequence[str]) -> int:
    """Train: the command line of `train_appo.py`, without the program's name."""
    from algorithms.run.config import asked_format, parse_train_flags, printed, resolve

    _print_version_if_asked(argv)
    wanted, argv = asked_format(argv)
    config, origins = resolve(parse_train_flags(argv))
    if wanted:
        from algorithms.run.defaults import origins_in
        from algorithms.run.tuning.measure import decided

        found = decided(config)
        print_and_exit(printed(found.to_flat(), origins | origins_in(found, config.undecided), wanted))
    if config.logging.log_format != "json":
        for line in describe(config.to_flat(), origins):
            say(line)
    from algorithms.run.main import train as start

    return start(config)


def enjoy(argv: Sequence[str]) -> int:
    """Play a trained policy: the command line of `enjoy_appo.py`, without the program's name."""
    from algorithms.playing.config import parse_enjoy

    _print_version_if_asked(argv)
    config = parse_enjoy(argv)
    from algorithms.tools.enjoy import enjoy as start

    return start(config)


def runs(argv: Sequence[str]) -> int:
    """List the runs of a folder: the command line of `appo runs`, without the program's name."""
    from algorithms.tools.runs import list_runs, parse_runs

    _print_version_if_asked(argv)
    return list_runs(parse_runs(argv))


def top(argv: Sequence[str]) -> int:
    """Show the live panel of a run: the command line of `appo top`, without the program's name."""
    from algorithms.tools.top import parse_top
    from algorithms.tools.top import top as start

    _print_version_if_asked(argv)
    return start(parse_top(argv))


def compare(argv: Sequence[str]) -> int:
    """Say in what runs differ: the command line of `appo compare`, without the program's name."""
    from algorithms.tools.compare import compare as start
    from algorithms.tools.compare import parse_compare

    _print_version_if_asked(argv)
    return start(parse_compare(argv))


def plot(argv: Sequence[str]) -> int:
    """Draw learning curves: the command line of `appo plot`, without the program's name."""
    from algorithms.tools.plot import parse_plot
    from algorithms.tools.plot import plot as start

    _print_version_if_asked(argv)
    return start(parse_plot(argv))


def replay(argv: Sequence[str]) -> int:
    """Repeat what led an environment to fail: the command line of `appo replay`, without the program's name."""
    from algorithms.tools.replay_incident import parse_replay
    from algorithms.tools.replay_incident import replay as start

    _print_version_if_asked(argv)
    return start(parse_replay(argv))


def lineage(argv: Sequence[str]) -> int:
    """Draw who copied whom in a population: the command line of `appo lineage`, without the program's name."""
    from algorithms.tools.lineage import lineage as start
    from algorithms.tools.lineage import parse_lineage

    _print_version_if_asked(argv)
    return start(parse_lineage(argv))


def doctor(argv: Sequence[str]) -> int:
    """Look for what keeps training from working: the command line of `appo doctor`, without the program's name."""
    from algorithms.tools.doctor import doctor as start

    _print_version_if_asked(argv)
    return start(argv)


def evaluate(argv: Sequence[str]) -> int:
    """Measure checkpoints: the command line of `appo evaluate`, without the program's name."""
    from algorithms.tools.flags import parse_evaluate

    _print_version_if_asked(argv)
    config = parse_evaluate(argv)
    from algorithms.tools.evaluate import evaluate as start

    return start(config)


def match(argv: Sequence[str]) -> int:
    """Play two checkpoints against each other: the command line of `appo match`, without the program's name."""
    from algorithms.tools.flags import parse_match

    _print_version_if_asked(argv)
    config = parse_match(argv)
    from algorithms.tools.match import match as start

    return start(config)


def export(argv: Sequence[str]) -> int:
    """Write a policy to an ONNX file: the command line of `appo export`, without the program's name."""
    from algorithms.tools.flags import parse_export

    _print_version_if_asked(argv)
    config = parse_export(argv)
    from algorithms.tools.export import export as start

    return start(config)


def hub(argv: Sequence[str]) -> int:
    """Share a policy, or fetch one: the command line of `appo hub`, without the program's name."""
    from algorithms.tools.flags import parse_hub

    _print_version_if_asked(argv)
    config = parse_hub(argv)
    from algorithms.tools.hub import hub as start

    return start(config)


def launch(argv: Sequence[str]) -> int:
    """Train many runs: the command line of `appo launch`, without the program's name."""
    from algorithms.tools.launch import launch as start
    from algorithms.tools.launch import parse_launch

    _print_version_if_asked(argv)
    return start(parse_launch(argv))


def selftest(argv: Sequence[str]) -> int:
    """Kill processes of a small run and look whether it keeps its promises: the command line of `appo selftest`."""
    from algorithms.tools.selftest.selftest import parse_selftest
    from algorithms.tools.selftest.selftest import selftest as start

    _print_version_if_asked(argv)
    return start(parse_selftest(argv))


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train a policy, or go on with a saved run"),
    "enjoy": (enjoy, "watch, measure or film a trained policy"),
    "runs": (runs, "list runs with their state, progress and best return"),
    "top": (top, "show the live panel of a run that is trained elsewhere, or has ended"),
    "compare": (compare, "say in what runs differ, and how well they learned"),
    "plot": (plot, "draw learning curves, with bands over seeds"),
    "lineage": (lineage, "draw who copied whom in a run of several policies"),
    "evaluate": (evaluate, "measure checkpoints, also while they are trained, and keep the best"),
    "match": (match, "play two checkpoints against each other, with a confidence interval"),
    "export": (export, "write a policy to an ONNX file that needs neither torch nor this program"),
    "hub": (hub, "share a policy on the Hugging Face Hub, or fetch one"),
    "launch": (launch, "train a grid of flags and seeds, some runs at a time"),
    "replay": (replay, "repeat what led an environment to fail"),
    "doctor": (doctor, "look whether installation, machine and environment are fit for training"),
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
        from importlib.metadata import PackageNotFoundError, version

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
