"""`appo evaluate` plays checkpoints of a run, beside training or after it, and keeps the one that plays best."""

import contextlib
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from appo.algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from appo.algorithms.ops.numpy_twins import ActionSampler, most_probable
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Acts, Player, load_player, play
from appo.algorithms.playing.saved_run import EVALUATED_METRIC, SavedRun, load_run
from appo.algorithms.playing.video import draw_offscreen
from appo.algorithms.run.config import Config
from appo.algorithms.run.folder import find_runs, refuse_links
from appo.algorithms.run.summary import LIVING_STATES
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.plain_state import read_plain
from appo.algorithms.tools.compare import read_each
from appo.algorithms.tools.enjoy import play_run
from appo.algorithms.tools.flags import EvaluateConfig
from appo.envs.config import EnvConfig
from appo.envs.make import make_alone
from appo.envs.spec import EnvSpec, GroupEnv
from appo.utils import checkpoint_files
from appo.utils.command_line import complain, say
from appo.utils.errors import AppoError, CheckpointError, EnvironmentFailure, ResourceError, UsageError
from appo.utils.hashed_files import Content
from appo.utils.metrics import MetricsLog
from appo.utils.run_folder import RunFolder, names_in_own, own_folder, remove_own
from appo.utils.system import machine
from appo.utils.tensorboard.writer import EventWriter
from appo.utils.tracebacks import traceback_of
from appo.utils.values import flag_hint, from_plain, json_text, shown

MODES = {"sampled": False, "most_probable": True}
"""How actions are chosen -> whether the most probable one is taken."""

MOST_SUMMARY_BYTES = 16 << 20
"""Of TensorBoard's files of a policy's evaluations; of larger ones about every second old point is left out."""

CONFIDENCE_PERCENT = 95

RESAMPLES = 2000

MOST_OF_THE_CORES = 0.015
"""What evaluations may take of all cores' time on average, so that training hardly feels them."""

LONGEST_SLEEP_SECONDS = 1.0

SAID = ("seed", "env_kwargs", "flags")
"""Flags that stand beside each result."""

SETTINGS = ("best_by", "env_kwargs", "flags")
"""Flags that means must have in common to be compared."""


class Evaluation(NamedTuple):
    """The returns of a policy that was evaluated, in one mode.

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
        """Return the evaluation in one line."""
        return (
            f"policy {self.policy} at {self.env_steps} env steps, {self.mode.replace('_', ' ')} actions: return "
            f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.episodes} episodes"
        )


def evaluate(config: EvaluateConfig) -> int:
    """Evaluate the newest checkpoint of every policy of runs, of one run newer ones too if asked; return the exit code.

    A run of several that cannot be evaluated is left out, which is said.

    Raises:
        UsageError: there is no such run, there are several to be followed, or its environment cannot be made.
        CheckpointError: there is nothing to evaluate, or nothing that can be used.
        EnvironmentFailure: the environment raised.
    """
    directories = find_runs(config.run, Path(config.train_dir))
    machine.limit_threads(1)
    if config.every_sec:
        if len(directories) > 1:
            raise UsageError(f"--every_sec follows one run, not {len(directories)}: {shown(', '.join(directories))}")
        _give_way()
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

    A single look at a run that cannot be written keeps nothing, and says so.

    Args:
        directory: of the run.
        config: how.
        name: of the run beside each result; empty: it is the only one.

    Attributes:
        settings: the flags that means must have in common to be compared.
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
            if self.config.every_sec:  # nobody may be there to read what is printed
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
        """Look again and again, until the run has ended and its last checkpoint is evaluated."""
        while True:
            begin, used_before, living = time.monotonic(), time.process_time(), self._is_living()
            try:
                self.look()
            except (CheckpointError, EnvironmentFailure, ResourceError) as error:  # the next checkpoint may do better
                complain(f"warning: {error}\n{traceback_of(error)}")
                self._close_envs()
            if not living:  # its last checkpoint was there before it said so
                return
            rest = (time.process_time() - used_before) / (MOST_OF_THE_CORES * machine.available_cores())
            due = begin + max(self.config.every_sec, rest)
            while (left := due - time.monotonic()) > 0 and (left < LONGEST_SLEEP_SECONDS or self._is_living()):
                time.sleep(min(left, LONGEST_SLEEP_SECONDS))

    def _is_living(self) -> bool:
        return self.folder.read_status().get("state") in LIVING_STATES

    def look(self) -> list[Evaluation]:
        """Evaluate the checkpoints that are new since the last look.

        Raises:
            UsageError, CheckpointError, EnvironmentFailure: as `evaluate`.
        """
        return [one for policy in self.folder.policies() for one in self._look_at(policy)]

    def _look_at(self, policy: int) -> list[Evaluation]:
        listed = checkpoint_files.listed_if_readable(self.folder.checkpoints(policy))
        newest = listed[0][1].name if listed else None
        if newest is None or newest == self._seen.get(policy):
            return []
        self._seen[policy] = newest
        run = load_run(self.folder, self._flags(policy, deterministic=False))
        found = [self._evaluate(run, policy, mode) for mode in MODES]
        for one in found:
            named = {"run": self.name} if self.name else {}
            text = f"{shown(self.name)}: {one.line()}" if self.name else one.line()
            say(json_text({**named, **one._asdict()}) if self.config.json else text)
        if self._log is None:
            return found
        for one in found:
            self._log.append(one._asdict() | {name: getattr(self.config, name) for name in SAID})
        self._show(policy, found)
        (chosen,) = (one for one in found if one.mode == self.config.best_by)
        self._keep_if_best(self.folder.checkpoints(policy, "best_evaluated"), run, chosen)
        if self._filming.is_due(policy):
            played = run._replace(config=_overrule(run.config, self.config))
            self._filming.film(played, self._flags(policy, deterministic=True), self.config.seed)
        return found

    def _flags(self, policy: int, *, deterministic: bool) -> EvaluationConfig:
        return EvaluationConfig(
            policy_index=policy,
            max_num_episodes=self.config.episodes,
            max_num_frames=self.config.max_num_frames,
            deterministic=deterministic,
            no_render=True,
            train_dir=self.config.train_dir,
            trust=self.config.trust,
        )

    def _evaluate(self, run: SavedRun, policy: int, mode: str) -> Evaluation:
        flags, begin = self._flags(policy, deterministic=MODES[mode]), time.monotonic()
        envs = self._envs = self._envs or make_alone(_overrule(run.config, self.config).env)
        player, env_steps = load_player(run, envs.spec, flags, self.config.seed)
        acts = cheapest(player, self.config.seed, deterministic=flags.deterministic)
        returns = [episode.episode_return for episode in play(envs, acts, flags, self.config.seed)]
        mean, std = (statistics.fmean(returns), statistics.pstdev(returns)) if returns else (float("nan"),) * 2
        seconds = time.monotonic() - begin
        return Evaluation(policy, env_steps, mode, len(returns), mean, std, *interval(returns), seconds)

    def _show(self, policy: int, found: list[Evaluation]) -> None:
        """Write TensorBoard's curves."""
        if policy not in self._writers:
            folder = self.folder.evaluation_summaries(policy)
            self._writers[policy] = EventWriter(folder, most_bytes=MOST_SUMMARY_BYTES)
        tags = {f"eval/{one.mode}_{name}": getattr(one, name) for one in found for name in ("mean", "low", "high")}
        self._writers[policy].add(found[0].env_steps, tags)

    def _keep_if_best(self, folder: Path, run: SavedRun, one: Evaluation) -> None:
        """Keep a checkpoint instead of the best before, if its mean is higher; say if the intervals are apart.

        One that was measured with other flags cannot be compared, and gives way; what plays in another environment
        than the flags of the run describe takes nobody's place.
        """
        for name in ("env_kwargs", "flags"):
            if getattr(self.config, name) != getattr(run.config.logging, f"eval_{name}"):
                self._say(f"not kept as the best: --{name} are not the --eval_{name} of the run")
                return
        before = read_best(folder)
        comparable = before is not None and before["settings"] in (None, self.settings)
        if not one.episodes or (before and comparable and one.mean <= before["value"]):
            return
        mark = {"metric": EVALUATED_METRIC, "value": one.mean, "low": one.low, "high": one.high}
        state = read_plain(run.files["state.json"]) | {"best": mark | {"settings": self.settings}}
        files: dict[str, Content] = {**run.files, "state.json": json.dumps(state, indent=1).encode()}
        path = checkpoint_files.save(folder, run.checkpoint.name, files)
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
            self._envs.close()
        self._envs = None


def interval(returns: list[float]) -> tuple[float, float]:
    """Return a confidence interval of the mean, by resampling; it is the same for the same returns.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; percentiles.
    """
    if not returns:
        return float("nan"), float("nan")
    picks = np.random.default_rng(0).integers(len(returns), size=(RESAMPLES, len(returns)))
    tail = (100 - CONFIDENCE_PERCENT) / 2
    low, high = np.percentile(np.asarray(returns)[picks].mean(axis=1), (tail, 100 - tail))
    return float(low), float(high)


def read_best(folder: Path) -> dict[str, Any] | None:
    """Return value, low, high, settings of the best evaluated checkpoint; None without one to be read."""
    for _, path in checkpoint_files.listed_if_readable(folder):
        with contextlib.suppress(CheckpointError, KeyError):
            kept = read_plain(checkpoint_files.read(path, "state.json"))["best"]
            return {name: float(kept[name]) for name in ("value", "low", "high")} | {"settings": kept.get("settings")}
    return None


def _overrule(saved: Config, config: EvaluateConfig) -> Config:
    """Return the flags of the run with those that evaluations change."""
    table = saved.table.by_part["env"]
    flags = {name.replace("-", "_"): value for name, value in config.flags.items()}
    if unknown := next((name for name in flags if name not in table), None):
        reason = (
            f"an evaluation plays, which only flags of the environment change{flag_hint(unknown, table, dashes='')}"
        )
        raise UsageError(f"--flags {shown(unknown)}: {reason}")
    changed = {name: from_plain(table[name], value) for name, value in flags.items()}
    env = EnvConfig(**{**{name: getattr(saved.env, name) for name in table}, **changed})
    return replace(saved, env=replace(env, env_kwargs={**env.env_kwargs, **config.env_kwargs}))


def _give_way() -> None:
    """Take the cores that others of the session leave, and a little more: a busy machine would leave nothing else.

    Linux shares cores between sessions before it looks at priorities, so this must be in that of the run.
    """
    machine.set_niceness(19)


# Videos of evaluations: how the newest policy plays, every now and then.


class Filming:
    """Films the first episode of evaluations; a failure costs one film.

    Args:
        folder: of the videos.
        every_minutes: the least time between two videos of a policy; 0: none are made.
    """

    def __init__(self, folder: Path, every_minutes: float) -> None:
        self.folder, self.every_seconds = folder, 60 * every_minutes
        self._failed: dict[int, float] = {}  # when a film of a policy last did
        self._warned = False  # since one succeeded
        if self.every_seconds:
            draw_offscreen()  # before anything imports what can draw

    def is_due(self, policy: int) -> bool:
        """Return whether the newest video of a policy, which may be of a run before a restart, is old enough."""
        if not self.every_seconds:
            return False
        newest = self._failed.get(policy, -math.inf)
        for path in self.folder.glob(f"p{policy}_*.mp4"):
            with contextlib.suppress(OSError):  # somebody has just removed it
                newest = max(newest, path.stat().st_mtime)
        return not 0 <= time.time() - newest < self.every_seconds  # one of the future tells of a clock put back

    def film(self, run: SavedRun, flags: EvaluationConfig, seed: int) -> None:
        """Play the first episode once more, drawn; log the first of several failures in a row.

        It is the same episode where the environment draws its random numbers from the seed.
        """
        name = f"p{flags.policy_index}_{int(run.checkpoint.name[5:]):012}"
        for unfinished in names_in_own(self.folder):
            if unfinished.startswith(f".p{flags.policy_index}_"):  # of a process that was killed
                with contextlib.suppress(OSError):  # whatever is in the way says so when the new one is written
                    remove_own(self.folder / unfinished)
        path = self.folder / f"{name}.mp4"
        filmed = replace(flags, save_video=str(path), max_num_episodes=1, json=True)
        try:
            with own_folder(self.folder, make=True):
                video = play_run(run, filmed, seed).video
        except (UsageError, EnvironmentFailure, ResourceError, OSError) as error:
            self._failed[flags.policy_index] = time.time()
            if not self._warned:
                trace = traceback_of(error) if isinstance(error, AppoError) else ""
                complain(f"warning: no video of an evaluation: {error}\n{trace}")
            self._warned = True
            return
        self._warned = False
        if video is not None and video.pictures:
            say(f"video: {path}, {video.pictures} pictures at {video.pictures_per_second:g} per second")


# Playing small networks without torch: evaluating them beside training would be little else than torch's dispatch.


class NumpyPlayer:
    """Acts as a `Player` of one environment does, but for rounding and the random numbers; made by `cheapest`.

    Args:
        mlp: the network.
        spec: of the environment.
        sampler: of actions; None: they are the most probable ones.
    """

    def __init__(self, mlp: NumpyMlp, spec: EnvSpec, sampler: ActionSampler | None) -> None:
        rows, self._mlp, self._sampler, self._parts = spec.num_agents, mlp, sampler, spec.action.parts
        self._logits = np.empty((rows, spec.action.num_logits), np.float32)
        self._value, self._log_prob = np.empty((2, rows), np.float32)
        self._action = np.empty((rows, spec.action.num_values), spec.action.dtype)

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Return actions [R, A] for observations [R, *], until the next call; `first` says nothing to an MLP."""
        self._mlp.act(obs[self._mlp.key], self._logits, self._value)
        if self._sampler is None:
            most_probable(self._parts, self._logits, self._action)
        else:
            self._sampler.sample(self._logits, self._action, self._log_prob)
        return self._action


def cheapest(player: Player, seed: int, *, deterministic: bool) -> Acts:
    """Return the player that acts at the smallest cost: the one given, unless its network and actions are simple."""
    policy, spec = player.policy, player.spec
    if type(policy) is not StochasticPolicy:  # a subclass may act otherwise
        return player
    sampler, mlp = policy.random(seed, spec.num_agents).sampler, numpy_mlp(policy.model, spec.num_agents)
    if sampler is None or mlp is None:
        return player
    return NumpyPlayer(mlp, spec, None if deterministic else sampler)
