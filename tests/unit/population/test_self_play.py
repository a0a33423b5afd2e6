import logging
import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.population.past_versions import PastVersions
from appo.algorithms.population.self_play import SelfPlay
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.policies import make_self_play
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock, Vector
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    MatchResults,
    Message,
    OpponentsReleased,
    OpponentTable,
    VersionDue,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import UsageError
from tests.states import adam_layout, adam_state

MODEL = ModelDescription([("weight", (3,))], 0, adam_layout(3))
META = {"version": 1, "updates": 0, "samples": 0, "discarded": 0, "adam_steps": 0, "learning_rate": 0.1}


class Pool:
    """Self-play of a run with two actors of one group each, whose learner is the test."""

    def __init__(self, directory: Path, *words: str, resumed: int | None = None) -> None:
        flags = [f"--train_dir={directory}", "--experiment=run", "--env=toy/Pair-v0", "--self_play"]
        config = parse_train([*flags, "--self_play_pool_size=2", "--stats_avg=4", *words])
        self.topology = Topology("serial", 2, 1, 1, 1, 1, 2, 4, num_past=3)
        fields = StateBlock.declare(0, adam_layout(3).vectors)
        for place in range(4):
            fields += WeightRing.declare(place, 3)
        self.arena = Arena.create(fields)
        self.block = StateBlock(self.arena, 0)
        directory.joinpath("run").mkdir(exist_ok=True)
        self.monitor = Monitor(directory / "run", replace(config.logging, tensorboard=False), [{}], Budget(10**9))
        state = {} if resumed is None else {"env_steps": resumed}
        found = make_self_play(config, self.topology, self.arena, MODEL, self.monitor, state)
        assert found is not None
        self.play: SelfPlay = found

    def learned(self, env_steps: int) -> list[Message]:
        """The learner has a version of this age, whose weights are its age; what main says then."""
        vectors = np.zeros((3, 3), np.float32)
        vectors[0] = env_steps
        self.block.write(adam_state(vectors, np.zeros(0), META | {"env_steps": env_steps}))
        return self.hear(VersionDue())

    def hear(self, *messages: Message) -> list[Message]:
        for message in messages:
            self.play.handle(message)
        return list(self.play.tick())

    def answer(self, number: int) -> list[Message]:
        return self.hear(OpponentsReleased(0, number), OpponentsReleased(1, number))

    def playing(self, place: int) -> float:
        """The weights in a place."""
        _, weights = WeightRing(self.arena, place).fetch(0)
        assert weights is not None
        return float(weights[0])

    @property
    def kept(self) -> list[int]:
        """Versions on disk in the end."""
        self.play.close()
        return self.on_disk

    @property
    def on_disk(self) -> list[int]:
        """Versions on disk now."""
        return sorted(int(path.name[5:]) for path in self.play.past.folder.glob("ckpt_*"))

    @property
    def shown(self) -> dict[str, float]:
        metrics = self.monitor.policies[0].metrics
        return {name.removeprefix("selfplay/"): value for name, value in metrics.items()}


def versions(messages: Iterable[Message], actor: int = 0) -> list[dict[int, int]]:
    """place -> version, as an actor was told."""
    told = [m for m in messages if isinstance(m, OpponentTable) and m.actor == actor]
    return [dict(zip(m.slots, m.versions, strict=True)) for m in told]


def test_the_first_version_is_the_policy_as_it_begins(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    assert pool.hear() == []  # its learner has said nothing yet
    said = pool.learned(0)
    assert said == [OpponentTable(actor, 1, (1,), (0,), (1.0,)) for actor in (0, 1)]
    assert pool.playing(1) == 0.0
    assert pool.learned(0) == []  # the same again
    assert versions(pool.learned(100), actor=1) == [{1: 0, 2: 100}]
    assert pool.playing(2) == 100.0
    assert pool.kept == [0, 100]


def test_a_place_gets_another_version_when_nobody_plays_there(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for env_steps in (0, 100, 200):
        said = pool.learned(env_steps)
    assert versions(said) == [{2: 100, 3: 200}]  # 0 has left place 1
    assert pool.learned(300) == []
    pool.hear(OpponentsReleased(0, 3))
    assert pool.hear(OpponentsReleased(1, 2)) == []  # that was before
    assert pool.playing(1) == 0.0
    assert versions(pool.answer(3)) == [{3: 200, 1: 300}]
    assert pool.playing(1) == 300.0
    assert pool.kept == [200, 300]


def test_an_actor_that_begins_again_is_told_and_waited_for(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for env_steps in (0, 100, 200):
        pool.learned(env_steps)
    pool.hear(OpponentsReleased(0, 3))
    said = pool.hear(WorkerRestarted("actor_0", ""), WorkerRestarted("learner_0", ""))
    assert versions(said) == [{2: 100, 3: 200}]
    assert versions(said, actor=1) == []
    pool.learned(300)
    assert pool.hear(OpponentsReleased(1, 3)) == []  # place 1 may still be played by who is being started
    assert versions(pool.hear(OpponentsReleased(0, 3))) == [{3: 200, 1: 300}]


def test_a_run_goes_on_with_the_pool_it_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Pool(tmp_path)
    for number, env_steps in enumerate((0, 100, 200, 300), start=1):
        before.learned(env_steps)
        before.answer(number)
    assert before.kept == [200, 300]
    after = Pool(tmp_path, resumed=250)
    assert after.on_disk == [200]  # what came after was taken back
    assert versions(after.hear()) == [{1: 200}]
    assert after.playing(1) == 200.0
    assert versions(after.learned(270)) == [{1: 200, 2: 270}]
    assert after.kept == [200, 270]
    path = after.play.past.folder / "ckpt_000000000200"
    path.joinpath("state.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert versions(Pool(tmp_path, resumed=300).hear()) == [{1: 270}]
    assert "damaged past version skipped" in caplog.text
    assert Pool(tmp_path).kept == []  # of a run that begins


def test_results_make_win_rates_and_ratings(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.learned(0)
    pool.learned(100)
    assert pool.shown == pytest.approx({"rating": 0.0, "pool": 2, "games": 0, "past_steps": 0}, abs=1e-6)
    wins = MatchResults(np.array([0, 0, 0, 0, 100, 9]), np.array([-1.0, 2.0, 3.0, 0.5, 0.0, 1.0]), 7)
    pool.hear(wins, MatchResults(np.array([0]), np.array([1.0]), 3))  # the last four count, that of nobody does not
    shown = pool.shown
    assert {name: shown[name] for name in ("pool", "games", "past_steps", "win_rate", "win_rate_min")} == {
        "pool": 2, "games": 7, "past_steps": 10, "win_rate": 0.75, "win_rate_min": 0.5
    }  # fmt: skip
    assert shown["rating"] == pool.play.rating > 0
    pool.learned(200)
    assert pool.play.opponents[-1].rating == shown["rating"]
    pool.play.close()
    (last,) = PastVersions(tmp_path / "run" / "checkpoint_p0" / "past", MODEL).load(200, 1)
    assert (last.env_steps, last.rating) == (200, shown["rating"])


def test_a_resumed_run_goes_on_from_the_rating_of_its_newest_version(tmp_path: Path) -> None:
    """Also the next version, which joins before many games have been played, and keeps its rating."""
    before = Pool(tmp_path)
    before.learned(0)
    before.hear(MatchResults(np.zeros(4, int), np.ones(4), 0))  # all are won
    before.learned(100)
    before.play.close()
    rating = before.play.opponents[-1].rating
    assert rating == pytest.approx(400 * math.log10(9))  # 4.5 of 5 games
    after = Pool(tmp_path, resumed=150)
    assert [one.rating for one in after.play.opponents] == [0.0, rating]
    assert after.play.rating == pytest.approx(rating)
    assert [one.record.win_rate for one in after.play.opponents] == pytest.approx([0.9, 0.5])
    after.learned(200)
    assert after.play.opponents[-1].rating == pytest.approx(rating)
    after.hear(MatchResults(np.array([100, 100]), np.array([1.0, 1.0]), 0))
    assert after.shown["rating"] == pytest.approx(rating + 400 * math.log10(3))  # 3 of 4 games against 100 and 200


def test_copies_among_past_versions_are_neither_read_nor_removed(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.learned(0)
    pool.learned(100)
    pool.play.close()
    folder = tmp_path / "run" / "checkpoint_p0" / "past"
    copies = {"ckpt_000000000100 (copy)", "ckpt_000000000000.bak", "ckpt_7", "ckpt_x"}
    for name in copies:
        shutil.copytree(folder / "ckpt_000000000100", folder / name)
    found = PastVersions(folder, MODEL).load(0, 5)  # the run goes on from its beginning
    assert [version.env_steps for version in found] == [0]
    assert {path.name for path in folder.iterdir()} == {"ckpt_000000000000", *copies}


def test_past_versions_of_a_learner_with_large_critics_are_read_again(tmp_path: Path) -> None:
    layout = adam_layout(3)
    critics = Vector(10 << 20, inherited=False)
    model = replace(MODEL, layout=replace(layout, vectors=layout.vectors | {"networks.critics": critics}))
    past = PastVersions(tmp_path / "past", model)
    state = adam_state(np.ones((3, 3), np.float32), np.zeros(0), META | {"env_steps": 7})
    past.add(replace(state, vectors=state.vectors | {"networks.critics": np.ones(10 << 20, np.float32)}), 1.5)
    past.close()
    (version,) = PastVersions(tmp_path / "past", model).load(7, 1)
    assert (version.env_steps, version.rating, version.weights.tolist()) == (7, 1.5, [1.0, 1.0, 1.0])


def test_hard_opponents_are_told_anew_after_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.population.self_play.TABLE_SECONDS", 0.0)
    pool = Pool(tmp_path, "--self_play_opponents=hard")
    pool.learned(0)
    assert pool.learned(100) == [OpponentTable(actor, 2, (1, 2), (0, 100), (0.5, 0.5)) for actor in (0, 1)]
    said = pool.hear(MatchResults(np.array([0, 0]), np.array([1.0, 1.0]), 0))
    easy, hard = (1 - 2.5 / 3) ** 2, 0.25
    assert [m.probabilities for m in said if isinstance(m, OpponentTable)] == [
        pytest.approx((easy / (easy + hard), hard / (easy + hard)))
    ] * 2
    assert pool.hear() == []


def test_without_disk_the_pool_goes_on_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(tmp_path)
    folder = pool.play.past.folder
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    assert versions(pool.learned(0)) == [{1: 0}]
    pool.play.close()
    assert "past version: cannot save" in caplog.text


@pytest.mark.parametrize("words", [["--num_policies=2"], ["--lockstep", "--inference=serial"]])
def test_what_does_not_go_together(words: list[str]) -> None:
    with pytest.raises(UsageError, match="self_play"):
        parse_train(["--env=toy/Pair-v0", "--self_play", *words])
