"""Callbacks: what they are told, that they cannot stop a run, and that none of it exists without them."""

import gc
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from appo.algorithms.runtime import callbacks as module
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import (
    Callbacks,
    Episode,
    EpisodeWatch,
    GroupHooks,
    Hooks,
    Step,
    Trajectory,
    find_callbacks,
    finite,
)
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.custom_summaries import CustomSummaries
from appo.algorithms.runtime.messages import Address, EpisodesDone, LearnerReport, Stop, WorkerReport
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.envs.spec import EpisodeStats
from appo.utils.errors import UsageError
from appo.utils.metrics import read_metrics
from tests.integration.runs import SerialRun
from tests.unit.runtime.groups import Played, episodes

HERE = __name__


class Note(Callbacks):
    """Keeps all it is told."""

    def __init__(self, config: Mapping[str, Any], worker: int | None = None) -> None:
        super().__init__(config, worker)
        self.told: list[Any] = []

    def on_episode_start(self, episode: Episode) -> None:
        self.told.append(("start", episode.env, episode.agent, episode.length))

    def on_episode_step(self, step: Step) -> None:
        observations = {key: array.copy() for key, array in step.observations.items()}
        self.told.append(step._replace(observations=observations, valid=step.valid.copy(), rewards=step.rewards.copy()))

    def on_episode_end(self, episode: Episode) -> dict[str, float]:
        self.told.append(episode)
        return {"mine": 2.0 * episode.length, "not finite": np.nan}

    def on_trajectory_end(self, trajectory: Trajectory) -> None:
        self.told.append(trajectory)

    def on_report(self, report: LearnerReport) -> None:
        self.told.append(report)

    def before_logging(self, policy: int, figures: dict[str, float]) -> None:
        figures |= {"mine/policy": policy, "env_steps": -1, "mine/nothing": np.inf}

    def on_end(self) -> None:
        self.told.append("end")

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.told if isinstance(one, kind)]


class Failing(Callbacks):
    """Raises what is no ordinary error, too."""

    calls: ClassVar[list[str]] = []

    def on_episode_step(self, step: Step) -> None:
        self.calls.append("step")
        sys.exit("two\nlines")

    def on_end(self) -> None:
        self.calls.append("end")


class Writing(Callbacks):
    def on_episode_step(self, step: Step) -> None:
        step.rewards[:] = 0


class Misspelt(Callbacks):
    def on_episode_stop(self, episode: Episode) -> None: ...


class Unmakable(Callbacks):
    def __init__(self, config: Mapping[str, Any], worker: int | None = None) -> None:
        raise OSError("no disk")


def told(hooks: Hooks, **flags: Any) -> Played:
    played = Played(rollout=8, slots=3, **flags)
    group = played.group
    group.hooks = GroupHooks(hooks, played.trajectories, group.plan.index * group.envs.num_rows, 1)
    return played.begin()


@pytest.mark.parametrize("same_step", [False, True])
def test_actors_tell_of_every_step_episode_and_trajectory(same_step: bool) -> None:
    note = Note({})
    played = told(Hooks([note]), same_step=same_step, reward_scale=10.0)
    t, starts, playing = played.trajectories, 0, np.zeros(3, np.bool_)
    for _ in range(2):
        played.trajectory()
    said = episodes([*played.said, *played.group.episodes.flush(now=True)])
    steps, ended, full = note.of(Step), note.of(Episode), note.of(Trajectory)
    assert len(steps) == 16
    for i, step in enumerate(steps):
        slot, at = divmod(i, 8)
        assert (step.valid == t.valid[slot, at]).all()
        assert (step.observations["obs"] == t.obs["obs"][slot, at]).all()
        np.testing.assert_allclose(step.rewards * 10, t.reward[slot, at])
        starts += np.count_nonzero(step.valid & ~playing)
        playing = step.valid & ~(step.terminated | step.truncated)
    assert [(0, e.episode_return, e.length) for e in ended] == said
    assert {e.stats["length"] for e in ended} == {e.length for e in ended}
    assert all(e.terminated != e.truncated for e in ended)
    assert sum(one[0] == "start" for one in note.told if type(one) is tuple) == starts > 3
    assert [tr.rewards.shape for tr in full] == [(8, 3)] * 2
    assert (full[0].rewards == t.reward[0]).all()
    assert (full[0].values == t.recorded["value"][0]).all()
    assert full[0].log_probabilities is full[0].recorded["log_prob"]
    assert not full[0].recorded["logits"].flags.writeable
    assert not full[0].rewards.flags.writeable
    assert not steps[0].actions.flags.writeable


def test_what_is_returned_at_the_end_of_an_episode_is_a_statistic() -> None:
    played = told(Hooks([Note({})]))
    played.trajectory()
    played.trajectory()
    stats = [s for done in played.group.episodes.flush(now=True) for _, s in done.stats]
    mine = [s for s in stats if "mine" in s]
    assert mine
    assert all(s.keys() == {"mine"} for s in mine)


def step_of(valid: list[bool], terminated: list[bool], reward: float = 1.0) -> Step:
    rows = len(valid)
    flags = [np.array(valid), np.array(terminated), np.zeros(rows, np.bool_)]
    return Step(
        first_env=4,
        num_agents=2,
        observations={"obs": np.zeros((rows, 1))},
        actions=np.zeros((rows, 1)),
        rewards=np.full(rows, reward, np.float32),
        num_frames=np.full(rows, 4),
        terminated=flags[1],
        truncated=flags[2],
        valid=flags[0],
        policies=np.zeros(rows, np.int32),
    )


def test_an_episode_that_a_failure_cuts_short_has_no_end_and_an_absent_agent_no_beginning() -> None:
    note = Note({})
    watch = EpisodeWatch(Hooks([note]), 2)
    nobody, both = [False, False], [True, True]
    assert watch.see(step_of([True, False], nobody), ()) == []
    assert watch.see(step_of(nobody, nobody, reward=50.0), ()) == []  # the environment was made again
    assert watch.see(step_of(both, nobody), ()) == []
    answers = watch.see(step_of(both, [True, False]), [EpisodeStats(0, {"x": 1.0})])
    assert answers == [EpisodeStats(0, {"mine": 16.0})]
    assert note.of(Episode) == [Episode(4, 0, 0, 2.0, 8, True, False, {"x": 1.0})]
    assert [one for one in note.told if type(one) is tuple] == [("start", 4, 0, 0)] * 2 + [("start", 4, 1, 0)]


def test_whoever_raises_is_off_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    note = Note({})
    Failing.calls.clear()
    hooks = Hooks([Failing({}), note, Writing({})])
    played = told(hooks)
    with caplog.at_level(logging.WARNING):
        played.steps(3)
        actor = ActorWorker(Address("actor", 0), [played.group], hooks=hooks)
        (report,) = (m for m in actor.handle(Stop()) if isinstance(m, WorkerReport))
    assert Failing.calls == ["step", "end"]  # its other methods go on
    assert (len(note.of(Step)), note.told[-1]) == (3, "end")
    assert hooks.off == report.totals["callbacks_off"] == 2
    first, second = caplog.messages
    assert first == f"callback {HERE}:Failing.on_episode_step is off: it raised SystemExit: two lines"
    assert second.startswith(f"callback {HERE}:Writing.on_episode_step is off: it raised ValueError: ")
    assert all(record.exc_info for record in caplog.records)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


class Huge(Callbacks):
    """Returns a number that no float holds, and then a dict that raises when it is read."""

    def on_episode_end(self, episode: Episode) -> Any:
        if episode.env == 4:
            return {"huge": 10**400, "one": 1}

        class Broken(dict[str, float]):
            def items(self) -> Any:
                raise Speechless

        return Broken()

    def before_logging(self, policy: int, figures: dict[str, float]) -> None:
        figures["mine/huge"] = 10**400


def test_answers_that_cannot_be_read_and_errors_without_a_text_end_no_run(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks([Huge({})])
    watch = EpisodeWatch(hooks, 4)
    ended = [True, False, True, False]
    answers = watch.see(step_of([True] * 4, ended), ())
    assert answers == [EpisodeStats(0, {"one": 1.0})]
    reason = "it raised Speechless: no text, as its __str__ raised ValueError"
    assert caplog.messages == [f"callback {HERE}:Huge.on_episode_end is off: {reason}"]
    assert hooks.off == 1
    assert CustomSummaries("", Hooks([Huge({})]))(0, {"env_steps": 8.0}) == {}


class Half(Callbacks):
    """Draws in the order of arguments that there was once, and counts beside that."""

    count = 0

    def on_summaries(self, policy: int, values: Any, env_steps: int, writer: Any) -> None:
        writer.add_histogram(env_steps, "mine/returns", values["reward"])

    def on_episodes(self, episodes: EpisodesDone) -> None:
        self.count += len(episodes.length)

    def on_report(self, report: LearnerReport) -> None:
        raise KeyError(report.policy)


def test_a_method_that_raises_is_off_alone_and_each_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half, other = Half(), Half()
    hooks = Hooks([half, other])
    monitor = Monitor(tmp_path, LoggingConfig(), [{}], Budget(10**6), hooks=hooks)
    for env_steps in (8, 16):
        monitor.handle(EpisodesDone(np.zeros(2, np.int32), np.array([3.0, 5.0]), np.array([7, 9]), ()))
        totals = {"env_steps": env_steps, "samples": 8, "discarded": 0, "updates": 1}
        monitor.handle(LearnerReport(0, 1, totals, {}))
    monitor.close()
    assert half.count == other.count == 4
    assert hooks.off == 4
    order = "TypeError: add_histogram(tag, values, global_step): the tag comes first, got 16"
    assert [message for message in caplog.messages if message.startswith("callback ")] == [
        *[f"callback {HERE}:Half.on_report is off: it raised KeyError: 0"] * 2,
        *[f"callback {HERE}:Half.on_summaries is off: it raised {order}"] * 2,
    ]
    assert [record["perf/callbacks_off"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [2]  # of reports


class Plain(Callbacks):
    """Has an __init__ of its own, which knows nothing of flags."""

    def __init__(self) -> None:
        self.seen = 0


def test_an_object_needs_no_arguments_and_gets_the_flags_of_the_run() -> None:
    watch, plain, own = Callbacks(), Plain(), Half({"gamma": 0.5}, 3)
    assert (dict(watch.config), watch.worker, dict(plain.config), plain.worker) == ({}, None, {}, None)
    assert dict(Half(worker=2).config) == {}
    Hooks.make((), {"gamma": 0.9}, None, (watch, plain, own))
    assert (watch.config, plain.config, own.config) == ({"gamma": 0.9}, {"gamma": 0.9}, {"gamma": 0.5})
    Hooks.make((), {"gamma": 0.8}, None, (watch, plain, own))  # the next run of the program
    assert (watch.config, plain.config, own.config) == ({"gamma": 0.8}, {"gamma": 0.8}, {"gamma": 0.5})
    assert dict(Callbacks().config) == {}


def test_what_cannot_be_made_is_off(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks.make([f"{HERE}:Unmakable", f"{HERE}:Note"], {}, 3)
    assert (hooks.off, hooks.hears("on_end")) == (1, True)
    assert caplog.messages == [f"--callbacks={HERE}:Unmakable cannot be made and is off"]
    with pytest.raises(UsageError, match=f"--callbacks={HERE}:Unmakable cannot be made: OSError: no disk"):
        Hooks.make([f"{HERE}:Unmakable"], {}, None)  # in main, where a run starts


def test_all_that_is_a_number_counts() -> None:
    answer = {"array": np.array(3.0), "yes": np.bool_(True), "tensor": torch.tensor(2.0), "large": 10**400}
    assert finite({**answer, "nan": math.nan, "word": "3", "list": [1.0]}) == {"array": 3.0, "yes": 1.0, "tensor": 2.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:LoggingConfig", "is no class derived from appo.Callbacks"),
        (f"{HERE}:step_of", "is no class derived from appo.Callbacks"),
        (f"{HERE}:Misspelt", "nobody calls its method on_episode_stop; did you mean on_episode_step?"),
        ("Note", "must read package.module:function"),
    ],
)
def test_a_name_that_is_no_callback_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_callbacks(name)


def test_main_tells_of_reports_and_takes_figures(tmp_path: Path) -> None:
    note = Note({})
    hooks = Hooks([note, Failing({})])
    monitor = Monitor(tmp_path, LoggingConfig(tensorboard=False), [{}], Budget(10**6), hooks=hooks)
    report = LearnerReport(0, 1, {"env_steps": 8, "samples": 8, "discarded": 0, "updates": 1}, {"train/loss": 0.5})
    monitor.handle(report)
    monitor.handle(WorkerReport("actor_0", {"collected": 9, "callbacks_off": 1}))
    assert monitor.line().endswith(" | 1 callbacks are off, see logs")
    monitor.close()
    assert note.told == [report, "end"]
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["mine/policy"], record["env_steps"], record["perf/callbacks_off"]) == (0, 8, 1)
    assert "mine/nothing" not in record


def test_without_callbacks_nothing_of_them_exists_or_runs(tmp_path: Path) -> None:
    run = SerialRun(
        tmp_path / "run",
        env="toy/Counter-v0",
        use_rnn=False,
        encoder_mlp_layers=16,
        rollout=8,
        batch_size=64,
        train_for_env_steps=256,
    )
    ran: list[str] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == module.__file__:
            ran.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        for _ in run.turns():
            pass
    finally:
        sys.setprofile(None)
    assert run.worker("learner").learner.updates >= 4
    assert ran == []
    actor = run.worker("actor")
    assert actor.hooks is None
    assert [group.hooks for group in actor.groups.values()] == [None] * len(actor.groups)
    reachable = gc.get_referents(actor, *actor.groups.values())
    assert not [one for one in reachable if isinstance(one, (Hooks, Callbacks, GroupHooks, EpisodeWatch))]
