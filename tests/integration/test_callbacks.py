"""Callbacks in runs: through all processes, from Python, and in enjoy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from appo import Callbacks, Training, train
from appo.algorithms.runtime.callbacks import Episode, Step, Trajectory
from appo.algorithms.runtime.messages import LearnerReport
from appo.utils.errors import UsageError
from tests.integration.enjoying import enjoyed
from tests.integration.runs import train as train_command

HERE = __name__
COUNTER: dict[str, Any] = {
    "env": "toy/Counter-v0",
    "use_rnn": False,
    "encoder_mlp_layers": "16",
    "rollout": 8,
    "batch_size": 64,
    "num_envs_per_worker": 8,
    "train_for_env_steps": 3000,
}


class Notes(Callbacks):
    """Writes at the end what it was told, a file for every object."""

    def __init__(self, config: Mapping[str, Any], worker: int | None = None) -> None:
        super().__init__(config, worker)
        self.told: dict[str, int] = {}

    def count(self, name: str, number: int = 1) -> None:
        self.told[name] = self.told.get(name, 0) + number

    def on_episode_start(self, episode: Episode) -> None:
        self.count("starts")

    def on_episode_step(self, step: Step) -> None:
        self.count("steps", int(step.valid.sum()))

    def on_episode_end(self, episode: Episode) -> dict[str, float]:
        self.count("ends")
        return {"mine": episode.length}

    def on_trajectory_end(self, trajectory: Trajectory) -> None:
        self.count("trajectories")

    def on_report(self, report: LearnerReport) -> None:
        self.count("reports")

    def before_logging(self, policy: int, figures: dict[str, float]) -> None:
        figures["mine/policy"] = policy

    def on_end(self) -> None:
        folder = Path(self.config["train_dir"], self.config["experiment"])
        text = " ".join(f"{name}={number}" for name, number in sorted(self.told.items()))
        (folder / f"told_{self.worker}").write_text(text)


class Broken(Callbacks):
    def on_episode_end(self, episode: Episode) -> None:
        raise ZeroDivisionError(f"actor {self.worker}")


class Watch(Callbacks):
    """Counts, as an object that is made without arguments."""

    reports = 0

    def on_report(self, report: LearnerReport) -> None:
        self.reports += 1


def told(directory: Path, worker: int | None) -> dict[str, int]:
    pairs = (pair.split("=") for pair in (directory / f"told_{worker}").read_text().split())
    return {name: int(number) for name, number in pairs}


@pytest.mark.slow
def test_every_process_tells_and_one_that_raises_stops_nothing(tmp_path: Path) -> None:
    names = f"{HERE}:Broken,{HERE}:Notes"
    run = train_command(tmp_path / "run", **COUNTER, inference="local", num_workers=2, callbacks=names)
    actors = [told(run.directory, worker) for worker in (0, 1)]
    assert sum(actor["steps"] for actor in actors) >= run.totals["actors_collected"]
    assert sum(actor["trajectories"] for actor in actors) == run.totals["actors_trajectories"]
    assert sum(actor["ends"] for actor in actors) == run.totals["actors_episodes"]
    assert all(0 <= actor["starts"] - actor["ends"] <= 8 for actor in actors)
    assert told(run.directory, None).keys() == {"reports"}
    last = run.metrics[-1]
    assert last["stats/mine/mean"] == last["len/mean"]
    assert (last["mine/policy"], last["perf/callbacks_off"]) == (0, 2)
    log = (run.directory / "logs/actor_1.log").read_text()
    assert f"callback {HERE}:Broken.on_episode_end is off: it raised ZeroDivisionError: actor 1\n" in log
    assert log.count("Traceback") == 1


def test_from_python_names_and_objects(tmp_path: Path) -> None:
    mine, watch = Notes({"train_dir": tmp_path, "experiment": "."}, 7), Watch()
    flags = COUNTER | {"train_dir": tmp_path, "experiment": "run", "inference": "serial", "num_workers": 1}
    result = train(flags, callbacks=[mine, f"{HERE}:Notes", watch], tensorboard=False, seed=1)
    assert told(tmp_path, 7).keys() == {"reports"}
    assert watch.reports == told(tmp_path, 7)["reports"]
    assert (watch.config["experiment"], watch.worker) == ("run", None)
    assert told(tmp_path, 7) == told(result.directory, None)
    assert told(result.directory, 0)["steps"] >= 3000
    assert result.report.figures[0]["stats/mine/mean"] > 0


def test_methods_of_objects_that_nobody_calls_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelt(Callbacks):
        def on_episode_stop(self, episode: object) -> None: ...

    with pytest.raises(UsageError, match="Misspelt: nobody calls its method on_episode_stop; did you mean on_episode_"):
        Training(COUNTER, callbacks=Misspelt())
    Training(COUNTER, callbacks=Notes({}, None))
    assert caplog.messages == ["Notes is an object of main: no actor calls its on_episode_start; name the class"]


@pytest.mark.parametrize("callbacks", [[Notes], Notes, None])
def test_a_class_in_the_place_of_an_object_is_one_line(callbacks: Any) -> None:
    with pytest.raises(UsageError, match="callbacks are names or objects derived from "):
        train(COUNTER, callbacks=callbacks)


def test_enjoy_tells_too(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--experiment=counter", "--max_num_episodes=4", f"--callbacks={HERE}:Notes")
    assert [episode["stats"]["mine"] for episode in result["episodes"]] == [e["length"] for e in result["episodes"]]
    seen = told(runs / "counter", 0)
    assert (seen["starts"], seen["ends"]) == (4, 4)
    assert seen["steps"] == sum(episode["length"] for episode in result["episodes"])
