"""Evaluating checkpoints: the same episodes each time, intervals, the best one, and beside training."""

import importlib.util
import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appo.algorithms import cli
from appo.algorithms.playing import player
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.run.config import Config
from appo.algorithms.run.observers import check_observers, evaluated_env, evaluation_words
from appo.algorithms.runtime.memory.plain_state import COUNTERS
from appo.algorithms.tools import evaluate
from appo.algorithms.tools.evaluate import Evaluation, Evaluator, Filming, read_best
from appo.algorithms.tools.flags import EvaluateConfig
from appo.envs.toys.toy import Counter
from appo.utils import checkpoint_files
from appo.utils.errors import CheckpointError, ResourceError, UsageError
from appo.utils.lock import RunLock
from tests.integration.enjoying import copied, enjoyed
from tests.integration.runs import train
from tests.videos import pictures_of


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "eval" / "results.jsonl").read_text().splitlines()]


def test_the_newest_checkpoint_plays_the_same_episodes_each_time(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = copied(runs, "counter", tmp_path, "/600", "/500")
    words = ["--experiment=counter", "--deterministic", "--seed=7", "--max_num_episodes=6"]
    played = enjoyed(capfd, tmp_path, *words)
    for _ in range(2):
        assert cli.run("evaluate", [str(run), "--episodes=6", "--seed=7"]) == 0
    assert capfd.readouterr().out.count("policy 0 at 600 env steps, ") == 4
    (sampled, probable), again = results(run)[:2], results(run)[2:]
    without_time = [{**one, "seconds": 0} for one in (sampled, probable)]
    assert without_time == [{**one, "seconds": 0} for one in again]
    assert [one["mode"] for one in (sampled, probable)] == ["sampled", "most_probable"]
    assert (probable["env_steps"], probable["policy"], probable["episodes"]) == (600, 0, 6)
    assert (probable["mean"], probable["std"]) == (pytest.approx(played["mean"]), pytest.approx(played["std"]))
    assert probable["low"] <= probable["mean"] <= probable["high"]
    best = enjoyed(capfd, tmp_path, *words, "--load_checkpoint_kind=best_evaluated")
    assert best["checkpoint"].endswith("checkpoint_p0/best_evaluated/ckpt_000000000600")
    assert best["mean"] == played["mean"]


LINKS = {
    "checkpoint_p0/best_evaluated": "victim/checkpoint_p0",
    "checkpoint_p0": "victim/checkpoint_p0",
    "checkpoint_p0/corrupt": "victim",
    "eval": "outside",
    "eval/results.jsonl": "outside/keys",
    "eval/.summary": "outside",
    "eval/.summary/p0": "outside",
    "eval/videos": "outside",
    "eval/videos/p0_000000000600.mp4": "outside/keys",
    "status.json": "outside/keys",
    "logs/new.log": "outside/missing",
}


@pytest.mark.parametrize("kind", ["link", "hard link", "the run itself"])
@pytest.mark.parametrize("place", LINKS)
def test_evaluating_a_strangers_run_writes_nothing_outside(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str, kind: str
) -> None:
    run, victim = copied(runs, "counter", tmp_path, "/600"), tmp_path / "victim"
    shutil.copytree(run, victim)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keys").write_text("a key\n")
    path, target = run / place, tmp_path / LINKS[place]
    if kind == "the run itself":
        shutil.rmtree(run)
        run.symlink_to(victim)
    else:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "hard link" and target.is_file():
            os.link(target, path)
        else:
            path.symlink_to(target)
    before = contents_of(victim) | contents_of(tmp_path / "outside")
    words = [str(run), "--episodes=2", "--max_num_frames=20"]
    code = cli.run_command(lambda: cli.run("evaluate", words))
    assert contents_of(victim) | contents_of(tmp_path / "outside") == before
    err = capfd.readouterr().err
    if kind == "hard link" and place in ("status.json", "eval/videos/p0_000000000600.mp4"):
        assert code == 0  # nothing is written there in place
        return
    assert (code, err.count("\n")) == (2, 1), err
    assert "is a link" in err or "a hard link" in err


def contents_of(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_only_a_better_one_takes_the_place_of_the_best(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(runs, "counter", tmp_path, "/100")
    means = {100: (1.0, 0.5, 1.5), 200: (0.9, 0.8, 1.0), 300: (1.2, 1.0, 1.4), 400: (2.0, 1.5, 2.5)}

    def evaluated(self: Evaluator, run: Any, policy: int, mode: str) -> Evaluation:
        steps = int(run.checkpoint.name[5:])
        mean, low, high = means[steps]
        factor = 1.0 if mode == "most_probable" else -1.0  # by which the best is not chosen
        return Evaluation(policy, steps, mode, 5, factor * mean, 0.1, low, high, 0.0)

    monkeypatch.setattr(Evaluator, "_evaluate", evaluated)
    parent = run / "checkpoint_p0"
    files = checkpoint_files.contents(parent / "ckpt_000000000100")
    kept = []
    with Evaluator(run, EvaluateConfig(best_by="most_probable", episodes=5)) as one:
        for steps in means:
            checkpoint_files.save(parent, checkpoint_files.checkpoint_name(steps), files)
            assert len(one.look()) == 2
            assert one.look() == []  # nothing new
            (name,) = (path.name for path in (parent / "best_evaluated").iterdir())
            kept.append((int(name[5:]), "may be chance" in capsys.readouterr().out))
    assert kept == [(100, False), (100, False), (300, True), (400, False)]
    kept_now = read_best(parent / "best_evaluated")
    assert kept_now is not None
    assert kept_now.pop("settings") == one.settings
    assert kept_now == {"value": 2.0, "low": 1.5, "high": 2.5}


def test_only_what_was_measured_alike_is_compared(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(runs, "counter", tmp_path, "/100", config={"eval_env_kwargs": {"horizon": 3}})
    means = iter([700.0, 7.0, 70.0, 6.0, 80.0, 9.0, 2.0])

    def evaluated(self: Evaluator, run: Any, policy: int, mode: str) -> Evaluation:
        mean = next(means) if mode == "sampled" else 1.0
        return Evaluation(policy, 100, mode, self.config.episodes - (mean == 80.0), mean, 0.1, mean, mean, 0.0)

    monkeypatch.setattr(Evaluator, "_evaluate", evaluated)
    values, said, own = [], [], {"horizon": 3}
    for flags in (
        {"env_kwargs": {"bonus": 100}},
        {"env_kwargs": own},
        {},
        {"env_kwargs": own, "seed": 8},
        {"env_kwargs": own, "max_num_frames": 100},  # the last episode does not end
        {"env_kwargs": own, "episodes": 9},
        {"env_kwargs": own, "best_by": "most_probable"},
    ):
        with Evaluator(run, EvaluateConfig(**flags)) as one:  # type: ignore[arg-type]
            one.look()
        kept = read_best(run / "checkpoint_p0" / "best_evaluated")
        values.append(kept and kept["value"])
        (*_, last) = capsys.readouterr().out.splitlines()
        said.append(last.partition("; ")[2] if "the best so far" in last else last[:20])
    assert values == [None, 7.0, 7.0, 7.0, 7.0, 9.0, 9.0]
    not_kept, no_better = "not kept as the best", "policy 0 at 100 env "
    assert said == [not_kept, "", not_kept, no_better, not_kept, "", not_kept]
    assert [(record["seed"], record["env_kwargs"]) for record in results(run)[::2]] == [
        (1_000_000, {"bonus": 100}),
        (1_000_000, own),
        (1_000_000, {}),
        (8, own),
        (1_000_000, own),
        (1_000_000, own),
        (1_000_000, own),
    ]


NO_END = "no episode ended before --max_num_frames"
REFUSED = {
    "gamma=0.9": "GIVEN gamma: an evaluation plays, which only flags of the environment change",
    "horizn=3": "; did you mean horizon?",
    "horizon=0": "--horizon must be at least 1, got 0",
    "reward_scale=5": "GIVEN reward_scale: an evaluation plays whole games in one environment and",
    "continuous_as_bins=5": "GIVEN continuous_as_bins: the network was trained with another meaning of its act",
}


@pytest.mark.parametrize("command", [["evaluate", "--episodes=2"], ["record", "--steps=3", "-o", "dataset"]])
def test_json_has_no_line_that_the_environment_prints(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def reset(env: Counter, **given: Any) -> Any:
        print("loading")
        return reset_quietly(env, **given)

    reset_quietly = Counter.reset
    monkeypatch.setattr(Counter, "reset", reset)
    monkeypatch.setattr(Counter, "close", lambda env: print("closing"))
    monkeypatch.chdir(tmp_path)
    name, *words = command
    assert cli.run(name, [str(copied(runs, "counter", tmp_path, "/600")), *words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert all(json.loads(line) for line in out.splitlines())
    assert "loading" in err
    assert "closing" in err


def test_flags_of_the_environment_may_differ(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = copied(runs, "counter", tmp_path, "/600")

    def means(*words: str) -> list[float]:
        assert cli.run("evaluate", [str(run), "--episodes=3", "--seed=7", "--json", *words]) == 0
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [one["mode"] for one in lines] == ["sampled", "most_probable"]
        return [one["mean"] for one in lines]

    plain, short = means(), means("--flags", "horizon=1", "env_vectorization=python")
    assert all(few < many for few, many in zip(short, plain, strict=True))
    assert [one["flags"] for one in results(run)] == [{}, {}, *[{"horizon": 1, "env_vectorization": "python"}] * 2]
    best = read_best(run / "checkpoint_p0" / "best_evaluated")
    assert best is not None
    assert best["value"] == plain[0]
    for words, message in REFUSED.items():
        with pytest.raises(UsageError, match=re.escape(message.replace("GIVEN", "--flags"))):
            cli.run("evaluate", [str(run), "--flags", words])


@pytest.mark.parametrize("low", [[], "a", 10**400, None], ids=["list", "text", "too large", "nothing"])
def test_a_best_evaluation_that_is_none_is_as_good_as_missing(low: object, tmp_path: Path) -> None:
    def read(low: object) -> object:
        best = {"metric": "eval/mean", "value": 0, "low": low, "high": 0}
        state = json.dumps({**dict.fromkeys(COUNTERS, 1), "best": best})
        checkpoint_files.save(tmp_path, checkpoint_files.checkpoint_name(1), {"state.json": state.encode()})
        return read_best(tmp_path)

    assert read(-1) == {"value": 0.0, "low": -1.0, "high": 0.0, "settings": None}
    assert read(low) is None


@pytest.mark.parametrize("words", REFUSED)
def test_a_start_refuses_the_flags_that_its_evaluations_would_refuse(words: str) -> None:
    name, value = words.split("=")
    flags = {"env": "CartPole-v1", "eval_every_sec": 1, "eval_flags": {name: json.loads(value)}}
    with pytest.raises(UsageError, match=re.escape(REFUSED[words].replace("GIVEN", "--eval_flags"))):
        check_observers(Config.from_flat(flags))
    assert evaluated_env(Config.from_flat(flags), {"horizon": 3}, {"a": 1}, "").horizon == 3


def test_an_evaluation_without_an_end_keeps_no_result(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(runs, "counter", tmp_path, "/600")
    monkeypatch.setattr(player, "LONG", 2)
    assert cli.run("evaluate", [str(run), "--max_num_frames=2"]) == 0
    printed = capfd.readouterr()
    assert [line.partition(": ")[2] for line in printed.out.splitlines()] == [NO_END] * 2
    assert printed.err.count("warning: no episode has ended after 2 steps: --max_num_frames=N stops, ") == 2
    assert results(run) == []


def test_nothing_to_evaluate(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, "counter", tmp_path)
    with pytest.raises(CheckpointError, match="run counter has no checkpoint yet"):
        cli.run("evaluate", [str(run)])
    with pytest.raises(UsageError, match="no run nothing, neither in"):
        cli.run("evaluate", ["nothing"])
    with pytest.raises(UsageError, match="appo evaluate needs a run"):
        cli.run("evaluate", [])


def test_a_run_that_cannot_be_written_is_evaluated_all_the_same(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = copied(runs, "counter", tmp_path, "/600")
    (run / "eval").touch()
    before = sorted(run.rglob("*"))
    assert cli.run("evaluate", [str(run), "--episodes=2"]) == 0
    printed = capfd.readouterr()
    assert printed.out.count("policy 0 at 600 env steps, ") == printed.out.count("\n") == 2
    assert printed.err == f"warning: results are not kept: cannot write {run / 'eval'}: Not a directory\n"
    assert sorted(run.rglob("*")) == before
    with (
        pytest.raises(ResourceError, match=r"^cannot write .*eval: Not a directory$"),
        Evaluator(run, EvaluateConfig(every_sec=1.0)),
    ):
        pass


def test_following_ends_after_the_last_checkpoint(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copied(runs, "counter", tmp_path, "/600")
    (run / "status.json").write_text('{"state": "finished"}')
    monkeypatch.setattr(evaluate.machine, "set_niceness", lambda niceness: None)  # this process is the suite's
    assert cli.run("evaluate", [str(run), "--every_sec=0.001", "--episodes=2"]) == 0
    assert len(results(run)) == 2


def test_following_ends_where_main_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status.json").write_text('{"state": "training"}')
    with RunLock(tmp_path / ".lock") as lock, Evaluator(tmp_path, EvaluateConfig(every_sec=0.001)) as one:
        looks: list[None] = []

        def look() -> list[Evaluation]:
            looks.append(None)
            if len(looks) == 3:
                lock.release()
            return []

        monkeypatch.setattr(one, "look", look)
        one.follow()
    assert len(looks) == 4  # the last one after the end


def test_a_full_disk_costs_an_evaluation_and_not_all_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status.json"
    status.write_text('{"state": "training"}')
    looks: list[str] = []

    def look(self: Evaluator) -> list[Evaluation]:
        looks.append(status.read_text())
        if len(looks) == 1:
            raise ResourceError("cannot save a checkpoint: No space left on device")
        status.write_text('{"state": "finished"}')
        return []

    monkeypatch.setattr(Evaluator, "look", look)
    with RunLock(tmp_path / ".lock"), Evaluator(tmp_path, EvaluateConfig(every_sec=0.001)) as one:
        one.follow()
    assert len(looks) == 3
    assert capsys.readouterr().err == "warning: cannot save a checkpoint: No space left on device\n"


def test_what_training_says_of_evaluations_is_understood_by_them() -> None:
    given = {"eval_every_sec": 2.5, "eval_episodes": 3, "eval_seed": 7, "eval_env_kwargs": {"x": [1, None]}}
    given["eval_flags"] = {"horizon": 9}
    words = evaluation_words(Config.from_flat({"env": "a", "experiment": "b", **given}))
    (found,) = cli.parse(words[0], words[1:])
    assert (found.run, found.every_sec, found.episodes) == ((str(Path("train_dir/b").absolute()),), 2.5, 3)
    assert (found.seed, found.env_kwargs, found.video_every_min) == (7, {"x": [1, None]}, 0.0)
    assert found.flags == {"horizon": 9}


def test_the_first_episode_is_filmed_now_and_then(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run = copied(runs, "windowed", tmp_path, "/600", config={"env": "tests.integration.enjoying:Drawn"})
    videos, parent = run / "eval" / "videos", run / "checkpoint_p0"
    newest = checkpoint_files.contents(parent / "ckpt_000000000600")

    def made() -> list[str]:
        assert cli.run("evaluate", [str(run), "--episodes=2", "--seed=7", "--video_every_min=10"]) == 0
        return sorted(path.name for path in videos.iterdir())

    assert made() == ["p0_000000000600.mp4"]
    (first,) = videos.iterdir()
    assert f"video: {first}, 4 pictures at 20 per second" in capfd.readouterr().out
    assert [round(float(picture[:35, :51].mean()) / 60) for picture in pictures_of(first)] == [0, 1, 2, 3]
    checkpoint_files.save(parent, checkpoint_files.checkpoint_name(700), newest)
    assert made() == ["p0_000000000600.mp4"]  # by another process, and yet not before its time
    os.utime(first, (before := time.time() - 601, before))
    (videos / ".p0_000000000650-1.mp4").touch()  # of one that was killed
    assert made() == ["p0_000000000600.mp4", "p0_000000000700.mp4"]
    assert len(results(run)) == 6


def test_what_cannot_be_filmed_is_said_once_and_evaluated(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(runs, "counter", tmp_path, "/100")
    parent = run / "checkpoint_p0"
    files = checkpoint_files.contents(parent / "ckpt_000000000100")
    with Evaluator(run, EvaluateConfig(episodes=2, video_every_min=1e-9)) as one:
        for steps in (200, 300):
            checkpoint_files.save(parent, checkpoint_files.checkpoint_name(steps), files)
            assert len(one.look()) == 2
    said = capsys.readouterr().err
    assert said.startswith("warning: no video of an evaluation: toy/Counter-v0 cannot be filmed: no rgb_array among")
    assert said.count("\n") == 1


def test_a_film_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, failures = 1000.0, iter([True, True, False, True])
    monkeypatch.setattr(evaluate.time, "time", lambda: now)

    def play_run(run: Any, flags: EvaluationConfig, seed: int) -> Any:
        if next(failures):
            raise ResourceError("cannot write the video: No space left on device")
        return 0, [], None

    monkeypatch.setattr(evaluate, "play_run", play_run)
    films, run = Filming(tmp_path, 1.0), cast(Any, SimpleNamespace(checkpoint=tmp_path / "ckpt_000000000001"))
    warnings = []
    for _ in range(4):
        assert films.is_due(0)
        films.film(run, EvaluationConfig(), 0)
        warnings.append(capsys.readouterr().err)
        now += 59.0
        assert films.is_due(0) is (len(warnings) == 3)  # nothing was made, and nothing failed
        now += 1.0
    warning = "warning: no video of an evaluation: cannot write the video: No space left on device\n"
    assert warnings == [warning, "", "", warning]


def test_videos_that_nobody_could_make_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"env": "CartPole-v1", "eval_video_every_min": 5}
    with pytest.raises(UsageError, match="--eval_video_every_min films evaluations: it needs --eval_every_sec"):
        check_observers(Config.from_flat(flags))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'needs the package imageio-ffmpeg: pip install "appo\[video\]"'):
        check_observers(Config.from_flat(flags | {"eval_every_sec": 1}))


@pytest.mark.slow
def test_beside_training(tmp_path: Path) -> None:
    small = {"env": "toy/Counter-v0", "use_rnn": False, "encoder_mlp_layers": "16", "train_for_seconds": 12}
    workers = {"inference": "local", "num_workers": 1, "eval_every_sec": 1, "eval_episodes": 3}
    run = train(tmp_path / "run", **small, **workers, eval_video_every_min=0.01)
    assert len(results(run.directory)) >= 2
    assert list(run.directory.glob("checkpoint_p0/best_evaluated/ckpt_*"))
    assert (run.directory / "logs" / "evaluator.log").read_text().count("warning: no video of an evaluation") == 1
    longer = small | {"train_for_seconds": 40}  # than it takes to fail, whatever else runs
    broken = train(tmp_path / "broken", **longer, **workers, eval_env_kwargs='{"no_such_argument": 1}')
    assert broken.status["state"] == "finished"
    assert "appo evaluate ended with exit code 2; starting it again (restart 1), see " in broken.stderr
