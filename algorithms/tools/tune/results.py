"""The results of a study: a table, a summary, a file of flags for `--config`, and a picture."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from appo.algorithms.ops.intervals import student_interval
from appo.algorithms.tools.comparison.plot import COLOURS, save_figure
from appo.algorithms.tools.train import toml_text
from appo.algorithms.tools.tune.study import Record
from appo.algorithms.tools.tune.trial import Outcome
from appo.utils.command_line import flag_text
from appo.utils.run_folder import replace_own, write_json_atomic
from appo.utils.system.machine import available_cores, processor_name

BEST, TABLE, SUMMARY, PICTURE = "best.toml", "table.txt", "summary.json", "study.png"
SHOWN_TRIALS, WIDTH = 10, 115  # of the table on the terminal


class Results(NamedTuple):
    """Everything that a study has found.

    Attributes:
        flags: flags of the winner, for `--config`.
        changes: values of each trial that differ from the preset, by number.
        confirmed: results of the winner with new seeds, by seed; the reason of a failed run.
    """

    flags: Mapping[str, object]
    records: Sequence[Record]
    changes: Mapping[int, Mapping[str, object]]
    winner: Record
    confirmed: Mapping[int, Outcome | str]
    importances: Mapping[str, float]


def write(results: Results, folder: Path) -> list[str]:
    """Write all files of a study; return the lines for the terminal."""
    whole, said = table(results), verdict(results)
    best = (*(f"# {line}" for line in said), *(f"{n} = {toml_text(value)}" for n, value in results.flags.items()))
    for name, lines in ((TABLE, whole), (BEST, best)):
        replace_own(folder / name, "".join(f"{line}\n" for line in lines).encode())
    write_json_atomic(folder / SUMMARY, summary(results))
    shown = [line if len(line) <= WIDTH else f"{line[:WIDTH]}..." for line in whole[: SHOWN_TRIALS + 1]]
    if has_plots := find_spec("matplotlib") is not None:
        draw(results, folder / PICTURE)
    picture = PICTURE if has_plots else 'no picture: pip install "appo[plots]"'
    files = f"in {folder}: {BEST}, {TABLE}, {SUMMARY}, {picture}"
    return [*shown, *said, files, f"train with the winner: appo train --config={folder / BEST}"]


def table(results: Results) -> list[str]:
    """Return a header and a line per trial: trials with more seeds first, then the best."""
    rows = [["trial", "state", "seeds", "score", "seconds", "changes of the preset"]]
    for one in sorted(results.records, key=lambda one: (-len(one.outcomes), -one.score, one.number)):
        score = f"{one.score:.2f}" if one.outcomes else "-"
        changes = " ".join(f"{n}={flag_text(v)}" for n, v in results.changes[one.number].items()) or "none"
        seconds = f"{sum(run.seconds for run in one.outcomes):.0f}"
        rows.append([str(one.number), one.state, str(len(one.outcomes)), score, seconds, changes])
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    return ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]


def verdict(results: Results) -> list[str]:
    """Return the comparison of winner and trial 0, by means with 95 % intervals (Student)."""
    preset, winner, changes = results.records[0], results.winner, results.changes[0]
    whole, name = (f"trial 0 ({words_of_first(changes)})", "trial 0") if changes else ("preset", "the preset")
    lines = [f"{whole}: {_mean(preset.outcomes)}"]
    if winner.number == preset.number:
        lines.append(f"no trial with all seeds was better than {name}")
    else:
        lines.append(f"trial {winner.number}: {_mean(winner.outcomes)}, chosen for this score")
    failed = {seed: one for seed, one in results.confirmed.items() if isinstance(one, str)}
    lines += [
        f"trial {winner.number} with seed {seed} failed: {' '.join(reason.split())}" for seed, reason in failed.items()
    ]
    if again := {seed: one for seed, one in results.confirmed.items() if isinstance(one, Outcome)}:
        lines.append(f"trial {winner.number} with seeds {','.join(map(str, again))}: {_mean([*again.values()])}")
        if winner.number != preset.number and fmean(one.score for one in again.values()) <= preset.score:
            lines.append(f"with new seeds the winner is not better than {name}: keep {name}, or search on")
    return lines


def words_of_first(changes: Mapping[str, object]) -> str:
    """Return the description of trial 0, which differs from the preset where the space or the budget forbids it."""
    return " ".join(["the preset except", *(f"{name}={flag_text(value)}" for name, value in changes.items())])


def summary(results: Results) -> dict[str, Any]:
    """Return the results for JSON."""
    states = [one.state for one in results.records]
    trials = [
        {
            "state": one.state,
            "score": one.score if one.outcomes else None,
            "runs": [run._asdict() for run in one.outcomes],
            "changes": results.changes[one.number],
            "error": one.error,
        }
        for one in results.records
    ]
    return {
        "machine": {"processor": processor_name(), "cores": available_cores()},
        "flags": results.flags,
        "winner": results.winner.number,
        "confirmed": {
            seed: one._asdict() if isinstance(one, Outcome) else {"error": one}
            for seed, one in results.confirmed.items()
        },
        "importances": results.importances,
        "states": {state: states.count(state) for state in sorted(set(states))},
        "trials": trials,
    }


def draw(results: Results, path: Path) -> None:
    """Draw scores over the seconds of a run, and the importances of flags."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=130, layout="constrained")
    costs, bars = figure.subplots(1, 2)
    groups: dict[str, list[Record]] = {}
    for one in (one for one in results.records if one.outcomes):
        groups.setdefault(f"seeds: {len(one.outcomes)}", []).append(one)
    groups |= {"trial 0": [one for one in results.records[:1] if one.outcomes], "winner": [results.winner]}
    for number, (label, group) in enumerate(groups.items()):
        x, y = [fmean(run.seconds for run in one.outcomes) for one in group], [one.score for one in group]
        colour, rings = COLOURS[number % len(COLOURS)], {"trial 0": 8, "winner": 12}
        size, face = rings.get(label, 4), "none" if label in rings else colour
        costs.plot(x, y, "o", markersize=size, color=colour, markerfacecolor=face, label=label)
    costs.set(xlabel="seconds of a run", ylabel="score")
    costs.legend(frameon=False, fontsize=8)
    shares = list(results.importances.items())[::-1]
    bars.barh([name for name, _ in shares], [share for _, share in shares], color=COLOURS[0])
    bars.set(xlabel="importance")
    save_figure(figure, path)


def _mean(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:  # of trial 0, while another trial has ended
        return "no run has ended"
    mean, margin = student_interval([one.score for one in outcomes])
    return f"{mean:.2f}" if len(outcomes) < 2 else f"{mean:.2f} [{mean - margin:.2f}, {mean + margin:.2f}]"
