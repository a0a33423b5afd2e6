"""The results of a study: a table, a summary, a file of flags for `--config`, and a picture."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.ops.intervals import student_interval
from appo.algorithms.tools.comparison.plot import COLOURS, save_figure
from appo.algorithms.tools.print_config import toml_text
from appo.algorithms.tools.tune.study import Record
from appo.algorithms.tools.tune.trial import Outcome
from appo.utils.command_line import flag_text
from appo.utils.run_folder import replace_own, write_json_atomic
from appo.utils.system.machine import available_cores, processor_name

BEST, TABLE, SUMMARY, PICTURE = "best.toml", "table.txt", "summary.json", "study.png"
SHOWN_TRIALS, WIDTH = 10, 115  # of the table on the terminal
LONGEST_NAME = 24


class Results(NamedTuple):
    """Everything that a study has found.

    Attributes:
        shared: flags of all runs, by name.
        preset: all flags of the preset.
        values: flags of each trial, by its number.
        records: trials.
        winner: best trial.
        confirmed: runs of the winner with new seeds, by seed.
        importances: share of each flag in the differences of scores.
    """

    shared: Mapping[str, object]
    preset: Mapping[str, object]
    values: Mapping[int, Mapping[str, object]]
    records: Sequence[Record]
    winner: Record
    confirmed: Mapping[int, Outcome]
    importances: Mapping[str, float]

    def changed(self, number: int) -> dict[str, object]:
        """Return the flags of a trial that differ from the preset."""
        values = self.values[number].items()
        return {name: value for name, value in values if flag_text(value) != flag_text(self.preset.get(name))}

    @property
    def flags(self) -> dict[str, object]:
        """Return the flags of the winner that are no defaults of its preset."""
        return {**self.shared, **self.values[self.winner.number]}


def write(results: Results, folder: Path) -> list[str]:
    """Write all files of a study; return the lines for the terminal."""
    winner, confirmed = results.winner, [one.score for one in results.confirmed.values()]
    whole = table(results)
    replace_own(folder / TABLE, ("\n".join(whole) + "\n").encode())
    write_json_atomic(folder / SUMMARY, summary(results))
    head = [f"trial {winner.number} of a study: {_mean([one.score for one in winner.outcomes])}"]
    head += [f"with new seeds: {_mean(confirmed)}"] if confirmed else []
    lines = [*(f"# {line}" for line in head), *(f"{n} = {toml_text(value)}" for n, value in results.flags.items())]
    replace_own(folder / BEST, ("\n".join(lines) + "\n").encode())
    said = [
        *(line if len(line) < WIDTH else f"{line[:WIDTH]}..." for line in whole[: SHOWN_TRIALS + 1]),
        *verdict(results),
        f"appo train --config={folder / BEST}",
    ]
    if find_spec("matplotlib") is None:
        return [*said, 'no picture: pip install "appo[plots]"']
    draw(results, folder / PICTURE)
    return [*said, f"in {folder}: {BEST}, {TABLE}, {SUMMARY}, {PICTURE}"]


def table(results: Results) -> list[str]:
    """Return a header and a line per trial: trials with more seeds first, then the best."""
    rows = [["trial", "state", "seeds", "score", "seconds", "changes of the preset"]]
    for one in sorted(results.records, key=lambda one: (-len(one.outcomes), -one.score, one.number)):
        score = f"{one.score:.2f}" if one.outcomes else "-"
        seconds = f"{sum(run.seconds for run in one.outcomes):.0f}"
        changes = " ".join(f"{n}={flag_text(v)}" for n, v in results.changed(one.number).items())
        rows.append([str(one.number), one.state, str(len(one.outcomes)), score, seconds, changes or "none"])
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    return ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]


def verdict(results: Results) -> list[str]:
    """Return the comparison of winner and preset, by means with 95 % intervals (Student)."""
    preset, winner = results.records[0], results.winner
    lines = [f"preset: {_mean([one.score for one in preset.outcomes])}"]
    if winner.number == preset.number:
        return [*lines, "no trial with all seeds was better than the preset"]
    lines.append(f"trial {winner.number}: {_mean([one.score for one in winner.outcomes])}, chosen for this score")
    if results.confirmed:
        scores = [one.score for one in results.confirmed.values()]
        lines.append(f"trial {winner.number} with seeds {','.join(map(str, results.confirmed))}: {_mean(scores)}")
        if sum(scores) / len(scores) <= preset.score:
            lines.append("with new seeds the winner is not better than the preset: keep the preset, or search on")
    return lines


def summary(results: Results) -> dict[str, Any]:
    """Return the results for JSON."""

    def plain(one: Record) -> dict[str, Any]:
        runs = [run._asdict() for run in one.outcomes]
        score = one.score if one.outcomes else None
        return {"trial": one.number, "state": one.state, "score": score, "runs": runs, "error": one.error}

    states = [one.state for one in results.records]
    return {
        "machine": {"processor": processor_name(), "cores": available_cores()},
        "flags": dict(results.shared),
        "trials": {state: states.count(state) for state in sorted(set(states))},
        "preset": plain(results.records[0]),
        "winner": {**plain(results.winner), "changes": results.changed(results.winner.number)},
        "confirmed": {str(seed): one._asdict() for seed, one in results.confirmed.items()},
        "importances": dict(results.importances),
        "all": [{**plain(one), "changes": results.changed(one.number)} for one in results.records],
    }


def draw(results: Results, path: Path) -> None:
    """Draw scores over the seconds of a run, and the importances of flags."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=130, layout="constrained")
    costs, bars = figure.subplots(1, 2)
    most = max(len(one.outcomes) for one in results.records)
    for seeds in range(1, most + 1):
        ended = [one for one in results.records if len(one.outcomes) == seeds]
        x = [sum(run.seconds for run in one.outcomes) / seeds for one in ended]
        label = f"{seeds} seed{'s' * (seeds > 1)}"
        costs.scatter(x, [one.score for one in ended], s=18, color=COLOURS[(seeds - 1) % len(COLOURS)], label=label)
    for one, marker, label in ((results.records[0], "s", "preset"), (results.winner, "*", "winner")):
        if one.outcomes:
            x_of_one = sum(run.seconds for run in one.outcomes) / len(one.outcomes)
            face = {"facecolors": "none", "edgecolors": "black", "label": label}
            costs.scatter([x_of_one], [one.score], s=140, marker=marker, **face)
    costs.set_xlabel("seconds of a run")
    costs.set_ylabel("score")
    costs.legend(frameon=False, fontsize=8)
    names = list(results.importances)[::-1]
    bars.barh([name[:LONGEST_NAME] for name in names], [results.importances[n] for n in names], color=COLOURS[0])
    bars.set_xlabel("importance")
    for axes in (costs, bars):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _mean(scores: Sequence[float]) -> str:
    mean, margin = student_interval(scores)
    return f"{mean:.2f}" if len(scores) < 2 else f"{mean:.2f} [{mean - margin:.2f}, {mean + margin:.2f}]"
