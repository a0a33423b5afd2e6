"""A study: trials in an Optuna journal on disk, and the decisions which trial runs next, goes on or ends early.

Every decision follows from the journal, so a study that was killed goes on where the last line of the journal ends.
"""

import importlib.util
import itertools
import math
import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from appo.algorithms.tools.tune.space import Range, Space
from appo.algorithms.tools.tune.trial import POINTS, Outcome
from appo.utils.command_line import flag_text
from appo.utils.directories import closing
from appo.utils.errors import UsageError, text_of
from appo.utils.run_folder import LOCK_FILE, remove_own, update_own

if TYPE_CHECKING:
    import optuna

BEST_SHARE = 3
NEAR_TRIALS, FREE_FLAGS = 16, 4
"""Trials after the preset that differ from the preset in a few random flags.

With all flags drawn at once, nearly every early trial was worse than the preset: after 560 s of one core the winner
returned 24.1 in Freeway of MinAtar, and 28.2 with these trials (preset: 21.7).
"""
WARM_UP_POINTS, FEWEST_CURVES = 3, 5
"""No run ends early before this point of its curve, and beside fewer curves."""
JOURNAL, LONGEST_LINE = "journal.log", 1 << 20
STUDY, RUN, SEEDS, ERROR, CONFIRMED = "study", "run", "seeds", "error", "confirmed"


class Record(NamedTuple):
    """A trial.

    Attributes:
        number: number of the trial; 0 is the preset.
        state: running, finished, stopped (ended early) or failed.
        words: parameters, see `space.words_of_preset`.
        outcomes: results of the whole runs, in the order of the seeds.
        curve: scores by step; a run has `POINTS` steps, the run of the second seed follows the first.
        error: reason of a failure.
    """

    number: int
    state: str
    words: Mapping[str, object]
    outcomes: tuple[Outcome, ...] = ()
    curve: Mapping[int, float] = {}
    error: str = ""

    @property
    def score(self) -> float:
        """Return the mean over the seeds; -inf without a whole run."""
        return fmean(one.score for one in self.outcomes) if self.outcomes else -math.inf


class Job(NamedTuple):
    """A run to be made: a trial with a seed, the seed's place among the seeds; a winner is confirmed with new seeds."""

    number: int
    words: Mapping[str, object]
    rung: int
    seed: int
    confirms: bool = False

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return f"{'confirm' if self.confirms else 'trial'}_{self.number}_seed-{self.seed}"

    @property
    def title(self) -> str:
        """Return the name of the run in messages."""
        return f"trial {self.number} {'new ' * self.confirms}seed {self.seed}"


def goes_on(own: float, others: Sequence[float]) -> bool:
    """Return whether a score is among the best third of all scores so far, its own included.

    Source: successive halving with asynchronous promotion (Li et al. 2020, arXiv:1810.05934), with seeds as rungs.
    """
    return sum(other > own for other in others) < math.ceil((len(others) + 1) / BEST_SHARE)


def is_hopeless(curve: Mapping[int, float], step: int, others: Sequence[Mapping[int, float]]) -> bool:
    """Return whether the best score of a run until a step is below the median of the other runs at the same tenth.

    Runs of all seeds count: only good trials have a second seed, and half of them would be below their median. The last
    score of a run that has ended early stays. Source: median stopping rule (Golovin et al. 2017, "Vizier").
    """
    tenth = (step - 1) % POINTS
    best = max(curve[at] for at in range(step - tenth, step + 1) if at in curve)
    seeds = range(0, max((at for one in others for at in one), default=0), POINTS)
    runs = [[one[at] for at in range(seed + 1, seed + tenth + 2) if at in one] for one in others for seed in seeds]
    known = [scores[-1] for scores in runs if scores]
    return tenth >= WARM_UP_POINTS and len(known) >= FEWEST_CURVES and best < median(known)


def reached(curve: Mapping[int, float], tenth: int) -> dict[int, float]:
    """Return the curve of a trial that still runs, without a run that has not reached this tenth."""
    last = max(curve, default=0)
    begun = (last - 1) // POINTS * POINTS
    return {at: score for at, score in curve.items() if at <= begun or last >= begun + tenth}


class Study:
    """Trials with their state on disk, trial 0 with the `first` parameters, the next ones near them.

    The caller holds the lock of the folder.
    """

    def __init__(self, folder: Path, space: Space, seeds: Sequence[int], first: Mapping[str, object]) -> None:
        self._optuna: Any = importlib.import_module("optuna")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        trials, self.space, self.seeds, path = self._optuna.trial, space, seeds, folder / JOURNAL
        try:
            self._study: optuna.study.Study = self._open(path)
        except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:  # Optuna checks no line
            raise UsageError(f"{path} is damaged: {type(error).__name__}: {text_of(error)}") from None
        # Another seed at each start: the seed of the first start would draw its trials again.
        self._study.sampler = self._optuna.samplers.TPESampler(seed=len(self.records()))
        draws, names = np.random.default_rng(0), list(space)
        size = min(FREE_FLAGS, len(names))
        free: list[list[str]] = [draws.choice(names, size, replace=False).tolist() for _ in range(NEAR_TRIALS)]
        for drawn in [[], *free][len(self._study.trials) :]:  # some may be missing after a kill
            self._study.enqueue_trial({name: word for name, word in first.items() if name not in drawn})
        self._waiting: deque[Job] = deque()
        self._running: dict[int, optuna.trial.Trial] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(trials.TrialState.RUNNING,)):
            self._advance(trials.Trial(self._study, trial._trial_id))

    def _open(self, path: Path) -> "optuna.study.Study":
        cut_torn_line(path)
        remove_own(Path(f"{path}{LOCK_FILE}"))  # of a killed process; Optuna has the same suffix
        storages = self._optuna.storages
        journal = storages.JournalStorage(storages.journal.JournalFileBackend(str(path)))
        # The user may rename or copy the folder, so an existing study is found by being the only one.
        name = next(iter(self._optuna.get_all_study_names(journal)), STUDY)
        given = {"study_name": name, "direction": "maximize", "load_if_exists": True}
        return cast("optuna.study.Study", self._optuna.create_study(storage=journal, **given))

    def records(self) -> list[Record]:
        """Return all trials that have begun."""
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    def next(self, most: float) -> Job | None:
        """Return the next run; None if no run waits and the study has `most` trials."""
        if not self._waiting and len(self.records()) < most:
            self._advance(self._study.ask())
        return self._waiting.popleft() if self._waiting else None

    def report(self, job: Job, number: int, score: float) -> bool:
        """Write a point of a curve, from 1 to `POINTS`; return whether the run is hopeless. The preset never is."""
        step, records = job.rung * POINTS + number, {record.number: record for record in self.records()}
        own = records.pop(job.number).curve
        others = [reached(one.curve, number) if one.state == "running" else one.curve for one in records.values()]
        if step not in own:  # a run that was killed is made again
            self._running[job.number].report(score, step)
        return job.number != 0 and is_hopeless({**own, step: score}, step, others)

    def confirm(self, job: Job, outcome: Outcome | str) -> None:
        """Write the end of a run with a new seed, or the reason of a failure."""
        known = {str(seed): one for seed, one in self.confirmed(job.number).items()}
        self._study.set_user_attr(f"{CONFIRMED}_{job.number}", {**known, str(job.seed): outcome})

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write the end of a run; the trial goes on with its next seed, or is finished."""
        self.report(job, POINTS, outcome.score)
        self._running[job.number].set_user_attr(f"{RUN}_{job.rung}", outcome)
        self._advance(self._running[job.number])

    def stop(self, number: int, error: str = "") -> None:
        """End a trial early: hopeless, or failed with an error."""
        if error:
            self._running[number].set_user_attr(ERROR, error)
        self._study.tell(self._running.pop(number), state=self._optuna.trial.TrialState.PRUNED)

    def winner(self) -> Record | None:
        """Return the best trial among the trials with all seeds; None without one."""
        whole = [one for one in self.records() if one.state == "finished" and len(one.outcomes) == len(self.seeds)]
        return max(whole, key=lambda one: one.score, default=None)

    def confirmed(self, number: int) -> dict[int, Outcome | str]:
        """Return the results of a trial with new seeds, by seed; the reason of a failed run."""
        known: dict[str, Any] = self._study.user_attrs.get(f"{CONFIRMED}_{number}", {})
        return {int(seed): one if isinstance(one, str) else Outcome(*one) for seed, one in known.items()}

    def importances(self) -> dict[str, float]:
        """Return the share of each flag in the differences of scores, by PED-ANOVA; {} for a few or equal scores."""
        scores = [one.score for one in self.records() if one.state == "finished"]
        if len(scores) < FEWEST_CURVES or len(set(scores)) == 1:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an interface that may change
            return dict(importlib.import_module("optuna.importance").get_param_importances(self._study))

    def _advance(self, trial: "optuna.trial.Trial") -> None:
        """Queue the next run of a trial, or finish the trial."""
        words = {name: self._suggest(trial, name) for name in self.space}
        records = {record.number: record for record in self.records()}
        own = records.pop(trial.number)
        self._running[trial.number] = trial
        rung, others = len(own.outcomes), [record.score for record in records.values() if record.outcomes]
        begun = rung < trial.user_attrs.get(SEEDS, 0)  # before a kill
        if own.error:
            self.stop(trial.number)
        elif not rung or (rung < len(self.seeds) and (trial.number == 0 or begun or goes_on(own.score, others))):
            if not begun:
                trial.set_user_attr(SEEDS, rung + 1)
            self._waiting.append(Job(trial.number, words, rung, self.seeds[rung]))
        else:
            self._study.tell(self._running.pop(trial.number), own.score)

    def _suggest(self, trial: "optuna.trial.Trial", name: str) -> object:
        """Return a parameter of a trial: the stored value, or a new one."""
        one = self.space[name]
        if not isinstance(one, Range):
            return trial.suggest_categorical(name, [flag_text(choice) for choice in one])
        if isinstance(one.low, int) and isinstance(one.high, int):
            return trial.suggest_int(name, one.low, one.high, log=one.log)
        return trial.suggest_float(name, one.low, one.high, log=one.log)


def cut_torn_line(path: Path) -> None:
    """Remove an unfinished last line of a journal, which a killed process has left; make a missing journal."""
    with closing(update_own(path)) as descriptor:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, LONGEST_LINE, max(0, size - LONGEST_LINE))
        os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)


def require_optuna() -> None:
    """Refuse a search without Optuna (UsageError)."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError('appo tune needs optuna: pip install "appo[tune]"')


def _record(trial: "optuna.trial.FrozenTrial") -> Record:
    kept, error = trial.user_attrs, str(trial.user_attrs.get(ERROR, ""))
    names = itertools.takewhile(kept.__contains__, (f"{RUN}_{rung}" for rung in itertools.count()))
    outcomes = tuple(Outcome(*kept[name]) for name in names)
    state = "failed" if error else {"RUNNING": "running", "COMPLETE": "finished"}.get(trial.state.name, "stopped")
    return Record(trial.number, state, trial.params, outcomes, trial.intermediate_values, error)
