"""Environments to watch, and what tests of enjoy do with runs of them (the fixture `runs`)."""

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from appo.algorithms import cli
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.run.trust import marked
from appo.utils import checkpoint_files


class Windowed(gymnasium.Env[Any, Any]):
    """Three steps an episode; counts the frames it shows, as an environment with a window would."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}
    frames_shown = 0

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        print("chatter of an environment")
        if self.render_mode == "human":
            Windowed.frames_shown += 1
        return np.zeros(2, np.float32), float(action[0]), self._step == 3, False, {}


class Drawn(Windowed):
    """The same, and draws: the brightness tells the step, the size is one that encoders do not like."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        return np.full((35, 51, 3), 60 * self._step, np.uint8)


class Blind(Windowed):
    """The same, and says that it draws, but cannot be asked to."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self) -> None:
        super().__init__()


gymnasium.register("Blind-v0", Blind)


def evaluation(runs: Path, experiment: str, **flags: Any) -> EvaluationConfig:
    defaults: dict[str, Any] = {"no_render": True, "seed": 7, "json": True}
    return EvaluationConfig(train_dir=str(runs), experiment=experiment, **(defaults | flags))


def enjoyed(capfd: pytest.CaptureFixture[str], runs: Path, *flags: str) -> dict[str, Any]:
    """What `enjoy --json` prints, which must be one JSON object and nothing else."""
    assert cli.run("enjoy", [f"--train_dir={runs}", "--json", "--no_render", *flags]) == 0
    printed = capfd.readouterr().out
    assert printed.count("\n") == 1
    result: dict[str, Any] = json.loads(printed)
    return result


def copied(runs: Path, experiment: str, train_dir: Path, *places: str, config: dict[str, Any] | None = None) -> Path:
    """A run directory whose checkpoints at these places are the newest one of another run.

    A place is folder/env_steps, or folder/env_steps=return of one that says so of itself, as the best do.
    """
    directory = train_dir / experiment
    directory.mkdir()
    flags = json.loads((runs / experiment / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(marked(flags)))
    loaded = checkpoint_files.load(runs / experiment / "checkpoint_p0")
    assert loaded is not None
    for place in places:
        folder, _, said = place.rpartition("/")
        steps, _, value = said.partition("=")
        state = json.loads(loaded.files["state.json"]) | {"env_steps": int(steps)}
        if value:
            state["best"] = {"metric": "reward/mean", "value": float(value)}
        files = {**loaded.files, "state.json": json.dumps(state).encode()}
        checkpoint_files.save(directory / "checkpoint_p0" / folder, checkpoint_files.checkpoint_name(int(steps)), files)
    return directory


def spoil(path: Path) -> None:
    """Change one byte of a checkpoint's weights."""
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
