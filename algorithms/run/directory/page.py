"""The page that a run leaves at its end: `README.md` in its folder, with the learning curve."""

import logging
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from appo.algorithms.run.algorithms import DEFAULT, find_algorithm, find_preset, flag_table
from appo.algorithms.run.config import Config
from appo.algorithms.run.folder import LOCATION, saved_flags
from appo.algorithms.run.program import given_again
from appo.algorithms.run.summary import RunSummary, summary
from appo.envs.given import is_given
from appo.utils.command_line import own_command, words_of, words_of_flag
from appo.utils.errors import StopNow
from appo.utils.metrics import duration, short_number
from appo.utils.run_folder import CURVE_FILE, PAGE_FILE, RunFolder, replace_own
from appo.utils.system import machine
from appo.utils.system.devices import choose_device
from appo.utils.values import is_number, shown

log = logging.getLogger(__name__)
PLOT_SECONDS = 3.0  # after which drawing is given up
SHORTEST_RUN_SECONDS = 5.0  # that is worth a picture, which takes a second


def leave_page(config: Config, *, with_curve: bool) -> None:
    """Write the page and, for a finished run, draw the curve; a failure costs one line in the log."""
    directory = config.run.run_directory
    try:
        if with_curve and config.logging.plot:
            _draw(directory)
        replace_own(RunFolder(directory).page, page(directory, config).encode(), durable=False)
    except StopNow:
        log.info("%s is not written: ended by Ctrl-C", PAGE_FILE)
    except Exception as error:  # the run is over and saved; nothing here may make a failure of it
        log.info("%s is not written: %s: %s", PAGE_FILE, type(error).__name__, error)


def page(directory: Path, config: Config) -> str:
    """Return the text of README.md: training, outcome, and the commands to repeat and to continue the run."""
    folder = RunFolder(directory)
    found, status = summary(directory), folder.read_status()
    assert found is not None, "a run that has ended has a status"
    flags = saved_flags(directory)  # with the seed, which may have been drawn, and of several learners the whole batch
    name = shlex.quote(f"--experiment={config.run.experiment}")
    location = "".join(f" {shlex.quote(word)}" for word in words_of_flags(flags, {}, ("train_dir", "experiments_root")))
    commands = [
        "The same again, from the start:",
        "",
        f"    {command_line(flags, config.by_kind)}",
        "",
        "More of it:",
        "",
        f"    appo train {name}{location} --train_for_env_steps=N   # go on, to a larger budget",
        f"    appo enjoy {name}{location}   # watch it; --json measures it",
    ]
    if is_given(config.env.env):
        commands = [given_again(config), ""]
    return "\n".join(
        [
            f"# {found.name}",
            "",
            f"{config.run.algo} on `{shown(config.env.env or 'datasets')}`; {found.state}: {_escape(found.reason)}.",
            "",
            *([f"![learning curve]({CURVE_FILE})", ""] if folder.curve.is_file() else []),
            "| | |",
            "|---|---|",
            *[f"| {key} | {value} |" for key, value in _figures(found, status, flags).items()],
            "",
            *commands,
            f"    appo plot {shlex.quote(config.run.experiment)}{location} -o curve.png   # its curve, or several",
            "",
            "Written by appo whenever training ends; `metrics.jsonl` has all figures, `config.json` all flags.",
            "",
        ]
    )


def command_line(flags: Mapping[str, object], by_kind: Mapping[str, object]) -> str:
    """Return the shortest command that trains with the same flags; see `words_of_flags`."""
    apart = ("env", "log_format", *LOCATION)  # a run of a program has no panel, the same run of a command has one
    names = (name for name in flag_table(str(flags.get("algo", DEFAULT))).flags if name not in apart)
    return shlex.join(["appo", "train", *words_of_flags(flags, by_kind, ["env", *names])])


def words_of_flags(flags: Mapping[str, object], by_kind: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the words of a command line that set these flags, without flags at their usual values."""
    return [word for name in unusual(flags, by_kind, names) for word in words_of_flag(name, flags[name])]


def unusual(flags: Mapping[str, object], by_kind: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the names of flags that differ from the env's preset, else from its kind of observation or the default."""
    algo = str(flags.get("algo", DEFAULT))
    device, preset = choose_device(str(flags["device"])), str(flags.get("preset", "default"))
    by_preset = find_preset(str(flags["env"]), device, find_algorithm(algo), preset)
    usual = {name: flag.default for name, flag in flag_table(algo).flags.items()}
    usual |= by_kind if by_preset is None else by_preset
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in usual.items()}
    return [name for name in names if flags[name] != plain[name]]


def _figures(found: RunSummary, status: Mapping[str, Any], flags: Mapping[str, object]) -> dict[str, str]:
    """Return the rows of the table; unknown figures are left out."""
    seconds, performance = status.get("elapsed_seconds"), status.get("performance") or {}
    ratio = performance.get("limit_ratio")
    rows = {
        "mean return, last episodes": None if found.last_return is None else f"{found.last_return:.2f}",
        "best mean return": None if found.best_return is None else f"{found.best_return:.2f}",
        "env steps": None if found.env_steps is None else f"{found.env_steps:,}",
        "time": duration(seconds) if is_number(seconds) else None,
    }
    if is_number(seconds) and seconds > 0 and found.env_steps:
        rows["env steps per second"] = short_number(found.env_steps / seconds)
    if is_number(ratio) and ratio > 0:
        rows["of the machine's limit"] = f"{ratio:.0%}"
    versions = (f"{package} {version_of(package) or '(not installed)'}" for package in ("appo", "torch", "gymnasium"))
    rows |= {
        "seed": words_of(flags["seed"]),
        "machine": f"{machine.processor_name()}, {machine.available_cores()} cores",
        "versions": ", ".join(versions),
    }
    return {key: _escape(value) for key, value in rows.items() if value is not None}


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _escape(text: str) -> str:
    """Return a text as a table's cell."""
    return shown(text).replace("|", "\\|") if text else "-"


def _draw(directory: Path) -> None:
    """Draw the curve in a separate process, which costs the run neither memory nor an endless wait."""
    seconds = RunFolder(directory).read_status().get("elapsed_seconds")
    if not is_number(seconds) or seconds < SHORTEST_RUN_SECONDS:
        return
    if find_spec("matplotlib") is None:
        log.info('no learning curve is drawn: matplotlib is not installed (pip install "appo[plots]")')
        return
    with tempfile.TemporaryDirectory(prefix="appo-curve-") as temporary:
        picture = Path(temporary, "curve.png")
        try:
            done = subprocess.run(  # noqa: S603 (our own interpreter and code)
                own_command(["plot", str(directory.absolute()), "-o", str(picture)]),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PLOT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.info("no learning curve: drawing took longer than %g s; appo plot does it at leisure", PLOT_SECONDS)
            return
        if done.returncode:
            log.info("no learning curve: %s", " ".join((done.stderr or done.stdout).split())[-300:])
        else:
            replace_own(RunFolder(directory).curve, picture.read_bytes(), durable=False, make=True)
