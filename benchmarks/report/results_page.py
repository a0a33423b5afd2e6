"""The text of docs/results.md, from saved scores and published returns."""

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from appo.utils.errors import UsageError
from benchmarks.scores.published import PUBLISHED, Published
from benchmarks.scores.trials import BENCHMARK, PUBLISHED_STEPS, TRIALS, Summary, Trial, summary
from benchmarks.shared import markdown

HEAD = """\
# Results

Generated from `benchmarks/results/*.json` and `benchmarks/scores/published.py` by `python -m benchmarks.report`;
change those, not this file.

What an environment's preset reaches in minutes on a small machine. Every run is `appo train` with the flags below the
table and nothing else, each seed from its own start. Afterwards the newest checkpoint, which need not be the best,
plays episodes that training has not seen, as `appo evaluate` does, with sampled and with the most probable actions.

- **Env steps** are frames, so that an action in Atari and VizDoom is four of them; where they differ, samples (steps of
  an agent that were trained on) follow. **Time** is that of the whole command, with start, saving and plot. Both are
  means over the seeds. `<=`: other programs used the machine meanwhile.
- **Return** is the mean over the seeds ± the standard deviation of their means; with one seed, of its episodes. Of
  several agents it is the mean of theirs.
- **Reached**, in rows with `--preset=sample_efficient`: the mean reaches the published figure behind the colon, after
  as many env steps and in the mode of acting that `benchmarks/scores/trials.py` names. **Within the standard error**:
  the mean plus its standard error over the seeds does; a large deviation may hide a seed that learned nothing.
- **Published** figures stand below ours, with a link to where they were found. They come from other machines and
  hours, often with an older version of the environment, tuned hyperparameters, or the best of several models. They tell
  what a good return is, not who is faster: for that, [performance.md](performance.md) lets peers run side by side.
"""

NOTHING = """\
No scores are kept: `python -m benchmarks.scores --json=benchmarks/results/scores.json` measures them.
"""

METHOD = """\
## Measuring again

    make bench-scores                             # all but trials of hours, then this file; four hours on two cores
    python -m benchmarks.scores --workload cartpole pong --seeds 1 2 --json=benchmarks/results/scores.json
    python -m benchmarks.scores --workload pong_published --seeds 1 --json=FILE   # a trial of hours, by its name
    python -m benchmarks.report                   # writes this file

`--add` keeps what the file holds and trains what is missing, so that an interrupted measurement goes on; `make
bench-scores` does that, so remove the file to measure all anew. Nothing else should run meanwhile.
"""

MODES = {"sampled": "sampled actions", "most_probable": "most probable actions"}


def render(files: Iterable[Mapping[str, Any]]) -> str:
    """Return docs/results.md from the contents of result files, in any order."""
    chapters = [_chapter(found[BENCHMARK]) for found in markdown.by_machine(files)]
    return "\n".join([HEAD, *(chapters or [NOTHING]), METHOD])


def _chapter(content: Mapping[str, Any]) -> str:
    """Return the tables of one machine."""
    if unknown := sorted(content["results"].keys() - TRIALS.keys()):
        raise UsageError(f"benchmarks/scores/trials.py has no {', '.join(unknown)}, of which there are results")
    results = {name: content["results"][name] for name in TRIALS if name in content["results"]}
    rows = [row for name, result in results.items() for row in _rows(name, list(result["seeds"].values()))]
    heads = ("environment", "", "env steps", "time", "return", "of")
    commands = markdown.table(("environment", "`appo train`", "`appo evaluate RUN`", "seeds"), _commands(results))
    parts = (markdown.machine_heading(content["machine"]), markdown.table(heads, rows), commands)
    return "\n\n".join([parts[0].rstrip(), *parts[1:], markdown.measured(results)]) + "\n"


def _rows(name: str, outcomes: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield our rows, one per mode, then published returns."""
    seen = (f"`{TRIALS[name].env}`", *_training(outcomes))
    for mode, actions in MODES.items():
        found = summary(outcomes, mode)
        of = f"{_count(found.seeds, 'seed')}, {_count(found.episodes, 'episode')}{_verdict(TRIALS[name], mode, found)}"
        yield seen[0], f"**appo**, {actions}", *seen[1:], _own(found), of
        seen = ("", "", "")
    for one in PUBLISHED.get(name.removesuffix(PUBLISHED_STEPS), ()):
        yield "", _linked(one), _millions(one.env_steps), "", _returned(one.mean, one.deviation), one.of


def _training(outcomes: list[dict[str, Any]]) -> tuple[str, str]:
    """Return mean env steps and time of training."""
    steps, samples, seconds = (fmean(one[what] for one in outcomes) for what in ("env_steps", "samples", "seconds"))
    more = f" ({_millions(samples)} samples)" if samples != steps else ""
    most = "<= " if any(one.get("shared") for one in outcomes) else ""
    return _millions(steps) + more, f"{most}{seconds:,.0f} s"


def _commands(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the training and evaluation commands of every environment, with the seeds."""
    for name, result in results.items():
        seeds_of: dict[tuple[str, str], list[str]] = {}
        for seed, one in result["seeds"].items():
            seeds_of.setdefault((one["training"], one["evaluation"]), []).append(seed)
        for (training, evaluation), numbers in seeds_of.items():
            yield f"`{TRIALS[name].env}`", f"`{training}`", f"`{evaluation}`", ", ".join(numbers)


def _linked(one: Published) -> str:
    return f"[{one.who}]({one.source})" + (f", {one.measured_on}" if one.measured_on else "")


def _verdict(trial: Trial, mode: str, found: Summary) -> str:
    """Return whether the mean, or mean plus standard error, reaches the goal; empty without a goal of this mode."""
    if trial.goal is None or mode != trial.mode or found.mean is None:
        return ""
    # The deviation of several seeds is that between their means, of a single seed that between episodes.
    error = (found.deviation or 0.0) / math.sqrt(found.seeds if found.seeds > 1 else max(1, found.episodes))
    within = "within the standard error" if found.mean + error >= trial.goal else "missed"
    return f"; {'reached' if found.mean >= trial.goal else within}: {trial.goal:,g}"


def _own(found: Summary) -> str:
    return "no episode ended" if found.mean is None else f"**{_returned(found.mean, found.deviation)}**"


def _returned(mean: float, deviation: float | None) -> str:
    """Format a mean and a deviation; digits depend on the size of the mean."""
    digits = next((digits for least, digits in ((1000, 0), (100, 1), (1, 2)) if abs(mean) >= least), 3)
    return f"{mean:,.{digits}f}" + (f" ± {deviation:,.{digits}f}" if deviation is not None else "")


def _millions(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.3g} M"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
