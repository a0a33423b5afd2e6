"""`appo evaluate` plays checkpoints of a run, during or after training, films them, and keeps the best checkpoint."""

import contextlib
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from appo.algorithms.ops.intervals import bootstrap_interval
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import cheapest, load_player, play
from appo.algorithms.playing.saved_run import EVALUATED_METRIC, SavedRun, load_run
from appo.algorithms.playing.video import draw_offscreen
from appo.algorithms.run.directory.taking import refuse_links
from appo.algorithms.run.folder import find_runs
from appo.algorithms.run.observers import evaluated_env
from appo.algorithms.run.summary import LIVING_STATES, is_locked
from appo.algorithms.runtime.memory.plain_state import LARGEST_PLAIN, read_plain
from appo.algorithms.tools.comparison.saved_runs import read_each
from appo.algorithms.tools.enjoy import play_run
from appo.algorithms.tools.flags import EvaluateConfig
from appo.envs.config import EnvConfig
from appo.envs.make import make_alone
from appo.envs.spec import GroupEnv
from appo.utils import checkpoint_files
from appo.utils.command_line import apart, complain, say
from appo.utils.errors import AppoError, CheckpointError, EnvironmentFailure, ResourceError, UsageError
from appo.utils.metrics import MetricsLog
from appo.utils.run_folder import RunFolder, names_in_own, own_folder, remove_own
from appo.utils.system import machine
from appo.utils.tensorboard.writer import EventWriter
from appo.utils.tracebacks import traceback_of
from appo.utils.values import json_text, shown

MODES = {"sampled": False, "most_probable": True}
"""Mode -> whether to take the most probable action."""
MOST_SUMMARY_BYTES = 16 << 20
"""Limit of TensorBoard's files of a policy's evaluations; a larger file loses about half of the old points."""
MOST_OF_THE_CORES = 0.015
"""Average share of all cores' time for evaluations."""
LONGEST_SLEEP_SECONDS = 1.0
SETTINGS = ("best_by", "env_kwargs", "flags")
"""Flags that must be equal for two means to be compared."""


class Evaluation(NamedTuple):
    """The returns of a policy in an evaluation, in one mode.

    Attributes:
        low, high: confidence interval of the mean return.
    """

    policy: int
    env_steps: int
    mode: str
    episodes: int
    mean: float
    std: float
    low: float
    high: float
    seconds: float

    def line(self) -> str:
        """Return the evaluation as one line."""
        got = f"return {self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.episodes} episodes"
        got = got if self.episodes else "no episode ended before --max_num_frames"
        return f"policy {self.policy} at {self.env_steps} env steps, {self.mode.replace('_', ' ')} actions: {got}"


def evaluate(config: EvaluateConfig) -> int:
    """Evaluate the newest checkpoint of every policy of the runs; return the exit code.

    With `--every_sec`, follow one run and evaluate newer checkpoints. Of several runs, leave out a run that cannot be
    evaluated, with a warning.

    Raises:
        UsageError: a run is missing, several runs cannot be followed, or the environment cannot be made.
        CheckpointError: no run has a usable checkpoint.
        EnvironmentFailure: the environment raised.
    """
    directories = find_runs(config.run, Path(config.train_dir))
    machine.limit_threads(1)
    if config.every_sec:
        if len(directories) > 1:
            raise UsageError(f"--every_sec follows one run, not {len(directories)}: {shown(', '.join(directories))}")
        # Linux shares cores between sessions before priorities count: the evaluator runs in the session of the run.
        machine.set_niceness(19)
        with Evaluator(next(iter(directories.values())), config) as evaluator:
            evaluator.follow()
        return 0

    def look(name: str, directory: Path) -> None:
        with Evaluator(directory, config, name if len(directories) > 1 else "") as evaluator:
            if not evaluator.look():
                raise CheckpointError(f"run {directory.name} has no checkpoint yet")

    read_each(directories, look)
    return 0


class Evaluator:
    """Plays the newest checkpoints of a run, every policy in the same episodes.

    Without `--every_sec`, an evaluation of a run that cannot be written keeps no results and prints a warning.

    Attributes:
        settings: flags that must be equal for two means to be compared.
    """

    def __init__(self, directory: Path, config: EvaluateConfig, name: str = "") -> None:
        self.directory, self.config, self.name = directory, config, name
        self.settings = {name: value for name in SETTINGS if (value := getattr(config, name)) or name != "flags"}
        self.folder = RunFolder(directory)
        self._seen: dict[int, str] = {}
        self._envs: GroupEnv | None = None
        self._log: MetricsLog | None = None
        self._writers: dict[int, EventWriter] = {}
        self._filming = Filming(self.folder.videos, config.video_every_min)

    def __enter__(self) -> Self:
        folder = self.folder.evaluation
        refuse_links(self.directory)
        try:
            with own_folder(folder, make=True):
                self._log = MetricsLog(self.folder.results)
        except OSError as error:
            if self.config.every_sec:  # nobody may read the output
                raise ResourceError(f"cannot write {folder}: {error.strerror}") from None
            complain(f"warning: results are not kept: cannot write {folder}: {error.strerror}\n")
        return self

    def __exit__(self, *exception: object) -> None:
        self._close_envs()
        if self._log is not None:
            self._log.close()
        for writer in self._writers.values():
            writer.close()

    def follow(self) -> None:
        """Evaluate repeatedly until the run has ended and the last checkpoint is evaluated."""
        while True:
            begin, used_before, living = time.monotonic(), time.process_time(), self._is_living()
            try:
                self.look()
            except (CheckpointError, EnvironmentFailure, ResourceError) as error:  # the next checkpoint may work
                complain(f"warning: {error}\n{traceback_of(error)}")
                self._close_envs()
            if not living:  # the last checkpoint precedes the final state
                return
            rest = (time.process_time() - used_before) / (MOST_OF_THE_CORES * machine.available_cores())
            due = begin + max(self.config.every_sec, rest)
            while (left := due - time.monotonic()) > 0 and (left < LONGEST_SLEEP_SECONDS or self._is_living()):
                time.sleep(min(left, LONGEST_SLEEP_SECONDS))

    def _is_living(self) -> bool:
        # A killed run leaves its last status, without its lock.
        return self.folder.read_status().get("state") in LIVING_STATES and is_locked(self.folder.lock)

    def look(self) -> list[Evaluation]:
        """Evaluate the checkpoints written since the last look. Errors are those of `evaluate`."""
        return [one for policy in self.folder.policies() for one in self._look_at(policy)]

    def _look_at(self, policy: int) -> list[Evaluation]:
        listed = checkpoint_files.listed_if_readable(self.folder.checkpoints(policy))
        newest = listed[0][1].name if listed else None
        if newest is None or newest == self._seen.get(policy):
            return []
        self._seen[policy] = newest
        with apart(as_json=self.config.json):
            run = load_run(self.folder, self._flags(policy, deterministic=False))
        found = [self._evaluate(run, policy, mode) for mode in MODES]
        for one in found:
            named = {"run": self.name} if self.name else {}
            text = f"{shown(self.name)}: {one.line()}" if self.name else one.line()
            say(json_text({**named, **one._asdict()}) if self.config.json else text)
        if self._log is None or not all(one.episodes for one in found):
            return found
        for one in found:
            self._log.append(
                one._asdict() | {name: getattr(self.config, name) for name in ("seed", "env_kwargs", "flags")}
            )
        self._show(policy, found)
        chosen = next(one for one in found if one.mode == self.config.best_by)
        self._keep_if_best(self.folder.checkpoints(policy, "best_evaluated"), run, chosen)
        if self._filming.is_due(policy):
            played = run._replace(config=replace(run.config, env=self._env_config(run)))
            self._filming.film(played, self._flags(policy, deterministic=True), self.config.seed)
        return found

    def _flags(self, policy: int, *, deterministic: bool) -> EvaluationConfig:
        episodes = self.config.episodes
        return EvaluationConfig.of(
            self.config, policy_index=policy, max_num_episodes=episodes, deterministic=deterministic
        )

    def _evaluate(self, run: SavedRun, policy: int, mode: str) -> Evaluation:
        flags, begin = self._flags(policy, deterministic=MODES[mode]), time.monotonic()
        with apart(as_json=flags.json):
            envs = self._envs = self._envs or make_alone(self._env_config(run))
            player, env_steps = load_player(run, envs.spec, flags, self.config.seed)
            acts = cheapest(player, self.config.seed, deterministic=flags.deterministic)
            returns = [episode.episode_return for episode in play(envs, acts, flags, self.config.seed)]
        seconds = time.monotonic() - begin
        spread = (statistics.fmean(returns), statistics.pstdev(returns)) if returns else (math.nan, math.nan)
        return Evaluation(policy, env_steps, mode, len(returns), *spread, *bootstrap_interval(returns), seconds)

    def _env_config(self, run: SavedRun) -> EnvConfig:
        env = evaluated_env(run.config, self.config.flags, self.config.env_kwargs, "--flags")
        if not env.env:
            name = shown(self.directory.name)
            raise UsageError(f"run {name} has learned from datasets: name its environment with --flags env=ID")
        return env

    def _show(self, policy: int, found: list[Evaluation]) -> None:
        if policy not in self._writers:
            self._writers[policy] = EventWriter(self.folder.evaluation_summaries(policy), most_bytes=MOST_SUMMARY_BYTES)
        tags = {f"eval/{one.mode}_{name}": getattr(one, name) for one in found for name in ("mean", "low", "high")}
        self._writers[policy].add(found[0].env_steps, tags)

    def _keep_if_best(self, folder: Path, run: SavedRun, one: Evaluation) -> None:
        """Replace the kept best checkpoint if the mean is higher; print whether the intervals overlap.

        A kept checkpoint measured in another environment is replaced. An evaluation in another environment than the
        run's evaluations, by other actions than those of the kept best, or with fewer than `episodes` keeps nothing.
        """
        for name in ("env_kwargs", "flags"):
            if getattr(self.config, name) != getattr(run.config.logging, f"eval_{name}"):
                self._say(f"not kept as the best: --{name} are not the --eval_{name} of the run")
                return
        before = read_best(folder)
        kept = before["settings"] if before else None
        by = kept.get("best_by") if isinstance(kept, dict) else None
        if by not in (None, self.config.best_by):
            self._say(f"not kept as the best: {folder} was chosen by --best_by={shown(str(by))}; remove it first")
            return
        if one.episodes < self.config.episodes:
            self._say(f"not kept as the best: {self.config.episodes - one.episodes} episodes did not end in time")
            return
        comparable = before is not None and before["settings"] in (None, self.settings)
        if before and comparable and one.mean <= before["value"]:
            return
        figures = {"value": one.mean, "low": one.low, "high": one.high}
        mark = {"metric": EVALUATED_METRIC, **figures, "settings": self.settings}
        state = json.dumps(read_plain(run.files["state.json"]) | {"best": mark}, indent=1).encode()
        path = checkpoint_files.save(folder, run.checkpoint.name, {**run.files, "state.json": state})
        for _, other in checkpoint_files.listed_if_readable(folder):
            if other != path:
                checkpoint_files.remove(other)
        sure = ""
        if before and not comparable:
            sure = "; the one before was measured with other flags"
        elif before and one.low <= before["high"]:
            sure = "; the intervals overlap, so that may be chance"
        self._say(f"the best so far: {path}{sure}")

    def _say(self, text: str) -> None:
        if not self.config.json:
            say(text)

    def _close_envs(self) -> None:
        if self._envs is not None:
            with apart(as_json=self.config.json):
                self._envs.close()
        self._envs = None


def read_best(folder: Path) -> dict[str, Any] | None:
    """Return value, low, high and settings of the best evaluated checkpoint; None if no checkpoint can be read."""
    for _, path in checkpoint_files.listed_if_readable(folder):
        with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError, OverflowError):
            kept = read_plain(checkpoint_files.read(path, "state.json", LARGEST_PLAIN))["best"]
            return {name: float(kept[name]) for name in ("value", "low", "high")} | {"settings": kept.get("settings")}
    return None


class Filming:
    """Films the first episode of evaluations, at most every so many minutes, 0: never; a failure costs one film."""

    def __init__(self, folder: Path, every_minutes: float) -> None:
        self.folder, self.every_seconds = folder, 60 * every_minutes
        self._failed: dict[int, float] = {}  # time of the last failure of a policy
        self._warned = False  # since the last success
        if self.every_seconds:
            draw_offscreen()  # before a drawing library is imported

    def is_due(self, policy: int) -> bool:
        """Return whether the newest video of a policy, perhaps from before a restart, is old enough."""
        if not self.every_seconds:
            return False
        newest = self._failed.get(policy, -math.inf)
        for path in self.folder.glob(f"p{policy}_*.mp4"):
            with contextlib.suppress(OSError):  # removed in between
                newest = max(newest, path.stat().st_mtime)
        return not 0 <= time.time() - newest < self.every_seconds  # a time in the future: the clock was put back

    def film(self, run: SavedRun, flags: EvaluationConfig, seed: int) -> None:
        """Play the first episode once more, drawn; warn at the first of several failures in a row.

        The episode is the evaluated episode if the environment draws random numbers from the seed only.
        """
        name = f"p{flags.policy_index}_{int(run.checkpoint.name[5:]):012}"
        for unfinished in names_in_own(self.folder):
            if unfinished.startswith(f".p{flags.policy_index}_"):  # of a process that was killed
                with contextlib.suppress(OSError):  # an obstacle is reported when the new film is written
                    remove_own(self.folder / unfinished)
        path = self.folder / f"{name}.mp4"
        filmed = replace(flags, save_video=str(path), max_num_episodes=1, json=True)
        try:
            with own_folder(self.folder, make=True), apart(as_json=flags.json):
                _, _, video = play_run(run, filmed, seed)
        except (UsageError, EnvironmentFailure, ResourceError, OSError) as error:
            self._failed[flags.policy_index] = time.time()
            if not self._warned:
                trace = traceback_of(error) if isinstance(error, AppoError) else ""
                complain(f"warning: no video of an evaluation: {error}\n{trace}")
            self._warned = True
            return
        self._warned = False
        if video is not None and video.pictures and not flags.json:
            say(f"video: {path}, {video.pictures} pictures at {video.pictures_per_second:g} per second")
