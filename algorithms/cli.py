"""The `appo` console script: a table of commands, and the parser of a command line.

multiprocessing imports the main script in every process of a run, so every process imports this module. The table names
modules as strings; only the module of the given command is imported.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from appo.utils.command_line import (
    UnknownFlag,
    complain,
    flush_or_drop,
    format_help,
    leading_words,
    open_closed_streams,
    parse_command_line,
    print_and_exit,
    require_working_folder,
    underscored,
    wants_help,
)
from appo.utils.errors import AppoError, Interrupted, UsageError, lack_of, text_of
from appo.utils.flags import Flag, flags_of
from appo.utils.system import interrupts
from appo.utils.tracebacks import format_error, traceback_of
from appo.utils.user_modules import keep_out_of
from appo.utils.values import nearest, shown


@dataclass(frozen=True)
class Command:
    """A row of the table: the command line of a command, and the function behind the command.

    Attributes:
        text: line of the command in the list of commands.
        run: "module:function" that takes the configuration and returns the exit code.
        config: "module:dataclass" of the flags; empty if `run` takes the words of the command line.
        usage: first line of the help.
        words: flags whose names may be left out at the beginning, in order; a flag with a list takes all words.
        needs: text of the error if a flag of `words` has no value; empty if all may be empty.
        short: short spellings of flags.
        implied: flag -> flag and value set by the first flag, unless given.
        check: "module:function" that refuses flags that contradict each other (UsageError).
        training: kind of the second argument: words after `--`, flags of training, or nothing.
    """

    text: str
    run: str
    config: str = ""
    usage: str = ""
    words: tuple[str, ...] = ()
    needs: str = ""
    short: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    check: str = ""
    training: Literal["nothing", "words", "flags"] = "nothing"


A_RUN = "a run: its folder, or its name in --train_dir"
CHECK_FOLDERS = "appo.algorithms.tools.flags:check_location"
OUTPUT = {"-o": "--output"}
COMMANDS: Mapping[str, Command] = {
    "train": Command("train a policy, or go on with a saved run", "appo.algorithms.tools.train:train"),
    "enjoy": Command(
        "watch, measure or film a trained policy",
        "appo.algorithms.tools.enjoy:enjoy",
        "appo.algorithms.playing.config:EvaluationConfig",
        "enjoy_appo.py [--env=ID] [flags]      for example: enjoy_appo.py --env=CartPole-v1",
        implied={"milestone": ("load_checkpoint_kind", "milestone")},
        check="appo.algorithms.playing.config:check",
    ),
    "runs": Command(
        "list runs and groups of runs with their state, progress and best return",
        "appo.algorithms.tools.runs:list_runs",
        "appo.algorithms.tools.flags:RunsConfig",
        "appo runs [RUN OR GROUP...] [flags]      for example: appo runs --train_dir=./train_dir",
        words=("runs",),
        check=CHECK_FOLDERS,
    ),
    "top": Command(
        "show the panel of runs in other processes, or of ended runs",
        "appo.algorithms.tools.top:top",
        "appo.algorithms.tools.flags:TopConfig",
        "appo top [RUN OR GROUP...] [flags]      for example: appo top CartPole-v1_1",
        words=("experiment",),
        check=CHECK_FOLDERS,
    ),
    "compare": Command(
        "print the differences of runs, and their returns",
        "appo.algorithms.tools.comparison.compare:compare",
        "appo.algorithms.tools.flags:CompareConfig",
        "appo compare RUN OR GROUP... [flags]      for example: appo compare CartPole-v1_1 CartPole-v1_2",
        words=("runs",),
        needs="two runs or more, or a group of them: appo runs lists them",
        check=CHECK_FOLDERS,
    ),
    "plot": Command(
        "draw learning curves with bands over seeds, or who copied whom in a run of several policies",
        "appo.algorithms.tools.comparison.plot:plot",
        "appo.algorithms.tools.flags:PlotConfig",
        "appo plot RUN OR GROUP... -o FILE [flags]      for example: appo plot CartPole-v1_1 nets -o curve.png",
        words=("runs",),
        needs="the folder of a run, or several: appo runs lists them",
        short=OUTPUT,
        check=CHECK_FOLDERS,
    ),
    "report": Command(
        "write a page about runs, to read and to send: curves, videos, flags, machine",
        "appo.algorithms.tools.report.report:report",
        "appo.algorithms.tools.flags:ReportConfig",
        "appo report RUN OR GROUP... -o FILE [flags]      for example: appo report CartPole-v1_1 nets -o page.html",
        words=("runs",),
        needs="the folder of a run, or several: appo runs lists them",
        short=OUTPUT,
        check=CHECK_FOLDERS,
    ),
    "evaluate": Command(
        "measure checkpoints, also while they are trained, and keep the best",
        "appo.algorithms.tools.evaluate:evaluate",
        "appo.algorithms.tools.flags:EvaluateConfig",
        "appo evaluate RUN OR GROUP... [flags]      for example: appo evaluate CartPole-v1_1 --episodes=100",
        words=("run",),
        needs=A_RUN,
        check=CHECK_FOLDERS,
    ),
    "record": Command(
        "write a dataset of episodes, played by a policy or at random",
        "appo.algorithms.tools.record:record",
        "appo.algorithms.tools.flags:RecordConfig",
        "appo record RUN -o DATASET [flags], or appo record --env=ID -o DATASET for random actions"
        "      for example: appo record CartPole-v1_1 -o datasets/expert",
        words=("run",),
        short=OUTPUT,
        check="appo.algorithms.tools.flags:check_record",
    ),
    "estimate": Command(
        "estimate the return of a policy from episodes of other policies",
        "appo.algorithms.tools.estimate:estimate",
        "appo.algorithms.tools.flags:EstimateConfig",
        "appo estimate RUN --dataset=D [flags]      for example: appo estimate CartPole-v1_1 --dataset=datasets/random",
        words=("run",),
        needs=A_RUN,
        check="appo.algorithms.tools.flags:check_estimate",
    ),
    "match": Command(
        "play two checkpoints against each other, with a confidence interval",
        "appo.algorithms.tools.match:match",
        "appo.algorithms.tools.flags:MatchConfig",
        "appo match A B [flags]      for example: appo match pong_2:best pong_1 --episodes=200",
        words=("a", "b"),
        needs="two runs, A and B: folders, or names in --train_dir",
        check=CHECK_FOLDERS,
    ),
    "export": Command(
        "write a policy to an ONNX file that needs neither torch nor this program",
        "appo.algorithms.tools.export:export",
        "appo.algorithms.tools.flags:ExportConfig",
        "appo export RUN [flags]      for example: appo export CartPole-v1_1 --output=policy.onnx",
        words=("run",),
        needs=A_RUN,
        short=OUTPUT,
        check=CHECK_FOLDERS,
    ),
    "hub": Command(
        "share a policy on the Hugging Face Hub, or fetch one",
        "appo.algorithms.tools.hub:hub",
        "appo.algorithms.tools.flags:HubConfig",
        "appo hub RUN --repo=USER/NAME [flags], or appo hub --download=USER/NAME"
        "      for example: appo hub CartPole-v1_1 --repo=me/cartpole --dry_run",
        words=("run",),
        check="appo.algorithms.tools.flags:check_hub",
    ),
    "launch": Command(
        "train a grid of flags and seeds, some runs at a time",
        "appo.algorithms.tools.launch:launch",
        "appo.algorithms.tools.flags:LaunchConfig",
        "appo launch --name=NAME [flags] -- FLAGS OF TRAINING"
        "      for example: appo launch --name=lr --seeds=1,2,3 --grid learning_rate=1e-4,1e-3 -- --env=CartPole-v1",
        check="appo.algorithms.tools.flags:check_launch",
        training="words",
    ),
    "tune": Command(
        "search for better values of flags than the preset's",
        "appo.algorithms.tools.tune.tune:tune",
        "appo.algorithms.tools.flags:TuneConfig",
        "appo tune STUDY --env=ID --trial_env_steps=N [flags] [flags of appo train], or appo tune STUDY to go on"
        "      for example: appo tune cartpole --env=CartPole-v1 --trial_env_steps=20000 --trials=40",
        words=("study",),
        needs="a study: a name for its folder in --train_dir",
        check="appo.algorithms.tools.flags:check_tune",
        training="flags",
    ),
    "replay": Command(
        "repeat the failure of an environment",
        "appo.algorithms.tools.replay_incident:replay",
        "appo.algorithms.tools.flags:ReplayConfig",
        "appo replay INCIDENT [flags]      for example: appo replay train_dir/a/incidents/env_actor_0_0.json",
        words=("incident",),
        needs="the file of an incident: look into incidents/ of the run",
    ),
    "doctor": Command(
        "check whether installation, machine and environment are fit for training",
        "appo.algorithms.tools.doctor:doctor",
        "appo.algorithms.tools.flags:DoctorConfig",
        "appo doctor [--env=ID] [--json] [flags of appo train]      for example: appo doctor --env=CartPole-v1",
        training="flags",
    ),
}


def main() -> int:
    """Run `appo COMMAND [flags]` and return the exit code."""
    return run_command(lambda: _dispatch(sys.argv[1:]))


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return the exit code; print a failure that the user can repair as one line on stderr."""
    open_closed_streams()
    with interrupts.unwound(), interrupts.kept():
        try:
            return command()
        except KeyboardInterrupt:
            return _interrupted()
        except Exception as error:
            if interrupts.is_behind(error):
                return _interrupted()
            if (told := error if isinstance(error, AppoError) else lack_of(error)) is None:
                told = AppoError(f"{type(error).__name__}: {text_of(error)}")
                told.traceback = format_error(error)
            complain(f"error: {' '.join(str(told).split())}\n")
            complain(traceback_of(told))
            return told.exit_code
        finally:
            flush_or_drop()


def _interrupted() -> int:
    complain("error: interrupted\n")
    return Interrupted.exit_code


def _dispatch(argv: Sequence[str]) -> int:
    _print_version_if_asked(argv[:1])
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:10}{command.text}" for name, command in COMMANDS.items()]
        print_and_exit("\n".join(["usage: appo COMMAND [flags]", *lines, "appo COMMAND --help lists the flags"]))
    if argv[0] not in COMMANDS:
        raise UsageError(f"unknown command {shown(argv[0])}{nearest(argv[0], COMMANDS)} ({', '.join(COMMANDS)})")
    return run(argv[0], argv[1:])


def run(name: str, argv: Sequence[str]) -> int:
    """Run `appo NAME` with these words and return the exit code.

    Raises:
        AppoError: the command line is wrong, or the command failed.
        SystemExit: help or the version was printed.
    """
    _print_version_if_asked(argv)
    if not wants_help(argv):
        require_working_folder()
    if name == "train":
        interrupts.stop_unwinding()
    command = COMMANDS[name]
    try:
        arguments = parse(name, argv) if command.config else (argv,)
        exit_code: int = resolve_name(command.run)(*arguments)
    except UnknownFlag as error:
        raise UnknownFlag(error.option, error.known, partial(_places, name)) from None
    return exit_code


def _places(name: str, flag: str) -> list[str]:
    """Return other commands with a flag of this name; for training, the algorithms as well."""
    others = [f"appo {other}" for other, c in COMMANDS.items() if c.config and flag in flags_of(resolve_name(c.config))]
    algorithms: list[str] = resolve_name("appo.algorithms.run.algorithms:algorithms_with")(flag)
    of_all = len(algorithms) == len(resolve_name("appo.algorithms.run.algorithms:ALGORITHMS"))
    if COMMANDS[name].config and (COMMANDS[name].training == "nothing" or of_all):
        return [*(["appo train"] if algorithms else []), *others]
    return algorithms or others


def parse(name: str, argv: Sequence[str]) -> tuple[Any, ...]:
    """Return the arguments of the function behind `appo NAME`: the configuration first.

    Raises:
        UsageError: an unknown flag, a wrong value, a missing word, or flags that contradict each other.
        SystemExit: help was printed.
    """
    command = COMMANDS[name]
    config_class = resolve_name(command.config)
    flags, argv = flags_of(config_class), underscored(argv)
    end = argv.index("--") if command.training == "words" and "--" in argv else len(argv)
    if wants_help(argv[:end]):
        print_and_exit(format_help(command.usage, {config_class.__name__.removesuffix("Config"): flags}, {}))
    train_flags = resolve_name("appo.algorithms.run.config:flags_on")(argv) if command.training == "flags" else {}
    given = _parse_words(command, argv[:end], flags, train_flags)
    for flag, (other, value) in command.implied.items():
        if given.get(flag) is not None:
            given.setdefault(other, value)
    config = config_class(**{flag: value for flag, value in given.items() if flag in flags})
    if command.needs and not all(getattr(config, word) for word in command.words):
        raise UsageError(f"appo {name} needs {command.needs}")
    arguments: tuple[Any, ...] = (config,)
    if command.training == "words":
        arguments += (tuple(argv[end + 1 :]),)
    elif command.training == "flags":
        arguments += ({flag: value for flag, value in given.items() if flag not in flags},)
    if train_dir := getattr(config, "train_dir", ""):
        keep_out_of(Path(train_dir))
    if command.check:
        resolve_name(command.check)(*arguments)
    return arguments


def _parse_words(
    command: Command, argv: Sequence[str], flags: Mapping[str, Flag], train_flags: Mapping[str, Flag]
) -> dict[str, object]:
    """Return the values of the given flags and of the words without a name."""
    leading, rest = leading_words(argv)
    lists = [name for name in command.words if flags[name].kind == "strs"]
    words = rest if lists else list(argv)
    for place, name in enumerate(() if lists else command.words):
        if place < len(words) and not words[place].startswith("-"):
            words[place] = f"--{name}={words[place]}"
        elif place == len(words) or not words[place].startswith(f"--{name}="):
            break
    words = [command.short.get(word, word) for word in words]
    given = parse_command_line(words, {**train_flags, **flags})
    for name in lists:
        given[name] = (*leading, *given.get(name, ()))  # type: ignore[misc] # unsplit: a path may contain a comma
    return given


def _print_version_if_asked(argv: Sequence[str]) -> None:
    if "--version" in argv:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print_and_exit(f"appo {version('appo')}")
        except PackageNotFoundError:
            print_and_exit("appo (not installed)")


if __name__ == "__main__":
    sys.exit(main())
