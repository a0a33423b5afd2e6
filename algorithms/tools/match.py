"""`appo match A B` plays two checkpoints against each other."""

import contextlib
import json
import os
import re
import secrets
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.ops.intervals import CONFIDENCE_PERCENT, bootstrap_interval, wilson_interval
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.episodes import PlayedEpisode
from appo.algorithms.playing.player import Player, load_player, play
from appo.algorithms.playing.saved_run import SavedRun, load_run
from appo.algorithms.population.matchmaking import sides_of
from appo.algorithms.run.config import ACTION_FLAGS
from appo.algorithms.run.folder import find_run
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.state_files import decode
from appo.algorithms.tools.flags import MatchConfig
from appo.envs.config import EnvConfig
from appo.envs.conversion import ActionUnits
from appo.envs.make import make_alone
from appo.envs.spaces import NO_BOUND
from appo.envs.spec import EnvSpec
from appo.utils import checkpoint_files
from appo.utils.command_line import apart, say
from appo.utils.errors import UsageError
from appo.utils.run_folder import CHECKPOINT_FOLDERS, RunFolder
from appo.utils.system import machine
from appo.utils.values import shown

WEIGHTS_FILE = "model.safetensors"
KINDS = ("latest", "best", "best_evaluated")


class Mean(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Score(NamedTuple):
    """The result of A against B.

    Attributes:
        difference: return of A's agents minus return of B's agents.
        win_rate: win rate of A; a draw counts half.
    """

    difference: Mean
    win_rate: Mean
    wins: int
    draws: int
    losses: int


class PairOfPlayers:
    """Acts for the agents of one environment, which two players share equally.

    Args:
        players: A and B.
        alike: whether both act in the same units; otherwise actions are converted to units of the environment.

    Attributes:
        side: 0: A plays agents with even numbers, 1: A plays agents with odd numbers.
    """

    def __init__(self, players: Sequence[Player], *, alike: bool) -> None:
        self.players, self.side, self.num_agents = players, 0, players[0].spec.num_agents
        self._units = [None if alike else ActionUnits(player.spec.action) for player in players]

    @property
    def is_of_a(self) -> Array:
        """Return whether A plays each agent, [R]."""
        return np.asarray(sides_of(self.num_agents) == self.side)

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Return actions [R, A]. Both players see all agents; memories of foreign agents end with the episode."""
        pairs = ((player.act(obs, first), units) for player, units in zip(self.players, self._units, strict=True))
        of_a, of_b = (units(x).astype(np.float32) if units and units.differ else x for x, units in pairs)
        return np.asarray(np.where(self.is_of_a[:, None], of_a, of_b))


def match(config: MatchConfig) -> int:
    """Play the match and print the result; return the exit code.

    Raises:
        UsageError: a run is missing, or the two policies cannot play each other.
        CheckpointError: a checkpoint is missing.
        EnvironmentFailure: the environment raised.
    """
    machine.limit_threads(1)
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    with apart(as_json=config.json):
        runs = find_side(config.a, config.policy_a, config), find_side(config.b, config.policy_b, config)
        a, b = runs
        if os.path.samefile(a.directory, b.directory) and a.files[WEIGHTS_FILE] == b.files[WEIGHTS_FILE]:
            names = " and ".join(dict.fromkeys(f"{shown(run.directory.name)} {run.checkpoint.name}" for run in runs))
            raise UsageError(f"A and B have the same weights, and a match against itself says nothing: {names}")
        env_steps, differences = _play(runs, config, seed)
    score = score_of(differences)
    say(_as_json(runs, env_steps, seed, score) if config.json else _summary(runs, env_steps, seed, score))
    return 0


def find_side(text: str, policy: int, config: MatchConfig) -> SavedRun:
    """Find run and checkpoint that a word of the command line names (UsageError, CheckpointError: missing)."""
    name, colon, which = text.rpartition(":")
    if not colon or not (which in KINDS or re.fullmatch(r"\d{1,15}", which)):
        name, which = text, "latest"
    folder = RunFolder(find_run(name, Path(config.train_dir)))
    kept = which in KINDS
    kind = which if kept else "latest"
    run = load_run(folder, replace(_flags(config), policy_index=policy, load_checkpoint_kind=kind))
    return run if kept else _near(run, policy, int(which))


def _flags(config: MatchConfig) -> EvaluationConfig:
    return EvaluationConfig.of(config, max_num_episodes=config.episodes)


def _near(run: SavedRun, policy: int, env_steps: int) -> SavedRun:
    """Return the run with the checkpoint nearest to a number of env steps (CheckpointError: it cannot be used)."""
    kept = (one for kind in CHECKPOINT_FOLDERS for one in checkpoint_files.listed(run.folder.checkpoints(policy, kind)))
    _, nearest = min(kept, key=lambda found: abs(found[0] - env_steps))
    files = checkpoint_files.contents(nearest, run.limit)
    decode(files)
    return run._replace(checkpoint=nearest, files=files)


def _play(runs: tuple[SavedRun, SavedRun], config: MatchConfig, seed: int) -> tuple[list[int], list[float]]:
    """Return the env steps of both policies, and the difference of returns in each episode."""
    flags, alike = _flags(config), _act_alike(runs)
    # Actions in different units are converted to the units of the environment.
    with contextlib.closing(make_alone(_env_of(runs[0], alike=alike))) as envs:
        spec = envs.spec
        if spec.num_agents < 2:
            raise UsageError(f"a match needs an environment of several agents; {runs[0].config.env.env} has one")
        _check_alike(runs, spec)
        # With equal seeds, two equal policies would play mirrored games.
        seeds = np.random.SeedSequence(seed).generate_state(2)
        together = zip(runs, [spec if alike else _as_played(run, spec) for run in runs], seeds, strict=True)
        loaded = [load_player(run, seen, flags, int(own)) for run, seen, own in together]
        pair = PairOfPlayers([player for player, _ in loaded], alike=alike)
        return [steps for _, steps in loaded], list(_differences(pair, play(envs, pair, flags, seed)))


def _differences(pair: PairOfPlayers, episodes: Iterator[PlayedEpisode]) -> Iterator[float]:
    """Yield return of A minus return of B for each episode with agents of both; sides change after each episode."""
    for number, episode in enumerate(episodes, start=1):
        returns = list(zip(episode.agent_returns, pair.is_of_a, strict=True))
        own, other = ([r for r, is_of_a in returns if r is not None and is_of_a == side] for side in (True, False))
        pair.side = number % 2
        if own and other:
            yield statistics.fmean(own) - statistics.fmean(other)


def _check_alike(runs: tuple[SavedRun, SavedRun], spec: EnvSpec) -> None:
    """Refuse policies with different observations or actions (UsageError)."""
    a, b = (_env_of(run, alike=_act_alike(runs)) for run in runs)
    if a == b:
        return
    other = make_alone(b)
    other.close()
    for what in ("observations", "action"):
        if getattr(spec, what) != getattr(other.spec, what):
            raise UsageError(
                f"{shown(a.env)} and {shown(b.env)} have different {what}: {getattr(spec, what)} and "
                f"{getattr(other.spec, what)}"
            )


def _act_alike(runs: tuple[SavedRun, SavedRun]) -> bool:
    a, b = (run.config.env for run in runs)
    return all(getattr(a, name) == getattr(b, name) for name in ACTION_FLAGS)


def _env_of(run: SavedRun, *, alike: bool) -> EnvConfig:
    """Return the environment of a run, in the environment's own units unless both policies act alike."""
    own = run.config.env
    if alike:
        return own
    return replace(own, action_scaling="off", action_distribution="gaussian", continuous_as_bins=None)


def _as_played(run: SavedRun, spec: EnvSpec) -> EnvSpec:
    """Return the environment as policies of a run see it, perhaps in own units (UsageError: no common units)."""
    if not any(spec.action.is_real):
        return spec
    own = make_alone(run.config.env)
    own.close()
    units, size = ActionUnits(own.spec.action), own.spec.action.num_values
    ends: list[Any] = [own.spec.action.low, own.spec.action.high]
    if own.spec.action.scale is not None:  # else they are in the environment's units, without a map
        ends = [units(np.full((1, size), end))[0, list(spec.action.is_real)] for end in (-np.inf, np.inf)]
    bounds = [spec.action.low, spec.action.high]
    if not np.allclose(*(np.clip(np.array(one, float), -NO_BOUND, NO_BOUND) for one in (ends, bounds))):
        raise UsageError(
            f"run {run.directory.name} acts in other units than its opponent, and its agents have bounds of their own"
        )
    return own.spec


def score_of(differences: Sequence[float]) -> Score:
    """Return the score for the differences of the episodes (UsageError: no episode had agents of both sides)."""
    if not differences:
        raise UsageError("in no episode agents of both sides took part")
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    draws = len(differences) - wins - losses
    mean, points = Mean(statistics.fmean(differences), *bootstrap_interval(differences)), wins + draws / 2
    return Score(mean, Mean(points / len(differences), *wilson_interval(points, len(differences))), wins, draws, losses)


def _summary(runs: Sequence[SavedRun], env_steps: Sequence[int], seed: int, score: Score) -> str:
    a, b = (f"{run.directory.name} at {steps} env steps" for run, steps in zip(runs, env_steps, strict=True))
    return (
        f"A: {a}\nB: {b}\n"
        f"{score.wins + score.draws + score.losses} episodes of {runs[0].config.env.env}, seed {seed}: A wins "
        f"{score.wins}, draws {score.draws}, loses {score.losses}\n"
        f"win rate of A {score.win_rate}, return of A minus that of B {score.difference} "
        f"({CONFIDENCE_PERCENT} % intervals)"
    )


def _as_json(runs: Sequence[SavedRun], env_steps: Sequence[int], seed: int, score: Score) -> str:
    sides = {
        name: {"run": str(run.directory), "checkpoint": str(run.checkpoint), "env_steps": steps}
        for name, run, steps in zip("ab", runs, env_steps, strict=True)
    }
    figures = {**score._asdict(), "difference": score.difference._asdict(), "win_rate": score.win_rate._asdict()}
    return json.dumps({**sides, "env": runs[0].config.env.env, "seed": seed, **figures})
