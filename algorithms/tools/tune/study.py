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
from typing import TYPE_CHECKING, Any, NamedTuple

from appo.algorithms.tools.tune.space import Range, Space
from appo.algorithms.tools.tune.trial import POINTS, Outcome
from appo.utils.command_line import flag_text
from appo.utils.directories import closing
from appo.utils.errors import UsageError
from appo.utils.run_folder import update_own

if TYPE_CHECKING:
    import optuna

BEST_SHARE = 3
"""A trial gets its next seed while it is among the best third."""
WARM_UP_POINTS, FEWEST_CURVES = 3, 5
"""No run ends early before this point of its curve, and beside fewer curves."""
STARTUP_TRIALS = 10
JOURNAL = "journal.log"
LONGEST_LINE = 1 << 20  # bytes
RUN, ERROR, CONFIRMED = "run", "error", "confirmed"


class Record(NamedTuple):
    """A trial.

    Attributes:
        number: number of the trial; 0 is the preset.
        state: running, finished, stopped (ended early) or failed.
        words: parameters, see `space.first_words`.
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
    """A run to be made: a trial with a seed.

    Attributes:
        number: number of the trial.
        words: parameters of the trial.
        rung: place of the seed among the seeds of the study; of a confirmation, among the new seeds.
        seed: seed of the run.
        confirms: whether the run belongs to the confirmation of the winner.
    """

    number: int
    words: Mapping[str, object]
    rung: int
    seed: int
    confirms: bool = False

    @property
    def name(self) -> str:
        """Return the name of the folder of the run."""
        return f"{'confirm' if self.confirms else 'trial'}_{self.number}_seed-{self.seed}"


def goes_on(own: float, others: Sequence[float]) -> bool:
    """Return whether a score is among the best third of all scores so far, its own included.

    Source: successive halving with asynchronous promotion (Li et al. 2020, arXiv:1810.05934), with seeds as rungs.
    """
    return sum(other > own for other in others) < math.ceil((len(others) + 1) / BEST_SHARE)


def is_hopeless(curve: Mapping[int, float], step: int, others: Sequence[Mapping[int, float]]) -> bool:
    """Return whether the best score of a run so far is below the median of the other trials at the same step.

    The score of a run that has ended early stays. Source: median stopping rule of Vizier (Golovin et al. 2017).

    Args:
        curve: scores of the trial by step.
        step: step of the newest score.
        others: curves of the other trials.
    """
    first = (step - 1) // POINTS * POINTS
    if step - first <= WARM_UP_POINTS:
        return False

    def of_run(one: Mapping[int, float]) -> list[float]:
        return [one[at] for at in range(first + 1, step + 1) if at in one]

    known = [scores[-1] for one in others if (scores := of_run(one))]
    return len(known) >= FEWEST_CURVES and max(of_run(curve)) < median(known)


def new_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return the seeds of a confirmation: the numbers after the largest seed."""
    return [max(seeds) + 1 + place for place in range(count)]


class _Unlocked:
    """The lock of the journal: none, because the lock of the study's folder excludes other processes.

    Optuna's own lock would outlive a killed process by 30 seconds.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Study:
    """Trials with their state on disk. Only one process may use a study.

    Args:
        folder: folder of the study.
        space: search space.
        seeds: seeds of a trial.
        first: parameters of trial 0.
    """

    def __init__(self, folder: Path, space: Space, seeds: Sequence[int], first: Mapping[str, object]) -> None:
        self._optuna = loaded = _load_optuna()
        self.space, self.seeds = space, seeds
        path = folder / JOURNAL
        cut_torn_line(path)
        backend = loaded.storages.journal.JournalFileBackend(str(path), lock_obj=_Unlocked())
        self._study: optuna.study.Study = loaded.create_study(
            storage=loaded.storages.JournalStorage(backend),
            study_name=folder.name,
            direction="maximize",
            load_if_exists=True,
        )
        count = len(self._study.trials)
        # Another seed at each start: the one of the first start would draw its trials again.
        self._study.sampler = loaded.samplers.TPESampler(seed=count, n_startup_trials=STARTUP_TRIALS)
        if not count:
            self._study.enqueue_trial(dict(first))
        self._waiting: deque[Job] = deque()
        self._running: dict[int, optuna.trial.Trial] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(loaded.trial.TrialState.RUNNING,)):
            self._advance(loaded.trial.Trial(self._study, trial._trial_id))

    def records(self) -> list[Record]:
        """Return all trials that have begun."""
        trials = self._study.get_trials(deepcopy=False)
        return [_record(trial) for trial in trials if trial.state.name != "WAITING"]

    def next(self, most: int | None) -> Job | None:
        """Return the next run; None if none is left, unless a run that is under way leads to one.

        Args:
            most: number of trials of the study; None: no limit.
        """
        if not self._waiting and (most is None or len(self.records()) < most):
            self._advance(self._study.ask())
        return self._waiting.popleft() if self._waiting else None

    def report(self, job: Job, number: int, score: float) -> bool:
        """Write a point of a curve, from 1 to `POINTS`; return whether the run is hopeless. The preset never is."""
        step, trial = job.rung * POINTS + number, self._running[job.number]
        records = {record.number: record for record in self.records()}
        if step not in records[job.number].curve:  # a run that was killed is made again
            trial.report(score, step)
        own = {**records.pop(job.number).curve, step: score}
        return job.number != 0 and is_hopeless(own, step, [record.curve for record in records.values()])

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write the end of a run; the trial goes on with its next seed, or is finished."""
        if job.confirms:
            known = self._study.user_attrs.get(f"{CONFIRMED}_{job.number}", {})
            self._study.set_user_attr(f"{CONFIRMED}_{job.number}", {**known, str(job.seed): outcome})
            return
        self.report(job, POINTS, outcome.score)
        trial = self._running[job.number]
        trial.set_user_attr(f"{RUN}_{job.rung}", outcome)
        self._advance(trial)

    def stop(self, job: Job, error: str = "") -> None:
        """End a trial early: hopeless, or failed with an error."""
        trial = self._running.pop(job.number)
        if error:
            trial.set_user_attr(ERROR, error)
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def winner(self) -> Record | None:
        """Return the best trial among those with all seeds; None without one."""
        whole = [one for one in self.records() if one.state == "finished" and len(one.outcomes) == len(self.seeds)]
        return max(whole, key=lambda one: one.score, default=None)

    def confirmed(self, number: int) -> dict[int, Outcome]:
        """Return the results of a trial with new seeds, by seed."""
        known: dict[str, Any] = self._study.user_attrs.get(f"{CONFIRMED}_{number}", {})
        return {int(seed): Outcome(*outcome) for seed, outcome in known.items()}

    def importances(self) -> dict[str, float]:
        """Return the share of each flag in the differences of scores, by PED-ANOVA; {} for a few or equal scores."""
        scores = [one.score for one in self.records() if one.state == "finished"]
        if len(scores) < FEWEST_CURVES or len(set(scores)) == 1:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an interface that may change
            shares: dict[str, float] = self._optuna.importance.get_param_importances(self._study)
            return shares

    def _advance(self, trial: "optuna.trial.Trial") -> None:
        """Queue the next run of a trial, or finish the trial."""
        words = {name: self._suggest(trial, name) for name in self.space}
        records = {record.number: record for record in self.records()}
        own = records.pop(trial.number)
        self._running[trial.number] = trial
        rung, others = len(own.outcomes), [record.score for record in records.values() if record.outcomes]
        if own.error:
            self.stop(Job(trial.number, words, rung, 0))
        elif not rung or (rung < len(self.seeds) and (trial.number == 0 or goes_on(own.score, others))):
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


def _record(trial: "optuna.trial.FrozenTrial") -> Record:
    kept, error = trial.user_attrs, str(trial.user_attrs.get(ERROR, ""))
    names = itertools.takewhile(kept.__contains__, (f"{RUN}_{rung}" for rung in itertools.count()))
    states = {"RUNNING": "running", "COMPLETE": "finished"}
    return Record(
        number=trial.number,
        state="failed" if error else states.get(trial.state.name, "stopped"),
        words=trial.params,
        outcomes=tuple(Outcome(*kept[name]) for name in names),
        curve=trial.intermediate_values,
        error=error,
    )


def require_optuna() -> None:
    """Refuse a search without Optuna (UsageError)."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError('appo tune needs optuna: pip install "appo[tune]"')


def _load_optuna() -> Any:
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    importlib.import_module("optuna.importance")
    return optuna
