"""Playing checkpoints: the command line of enjoy over runs trained here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from algorithms import cli
from algorithms.appo.build import new_model
from algorithms.appo.config import Config
from algorithms.evaluation import Player, find_run, load_player, make_envs, play
from algorithms.evaluation_config import EvaluationConfig
from envs.make import make_group
from envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.videos import pictures_of
from utils import checkpoint
from utils.errors import CheckpointError, UsageError
from utils.lock import RunLock

ROOT = Path(__file__).parents[2]
COUNTER_LENGTHS_ARE_IN = range(3, 10)


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


TRAIN_ALL = "import json, sys; from algorithms.cli import train; [train(argv) for argv in json.loads(sys.argv[1])]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained CartPole run, the newest, and short runs of other kinds."""
    train_dir = tmp_path_factory.mktemp("runs")
    common = ["--inference=serial", "--seed=1", f"--train_dir={train_dir}", "--no_tensorboard"]
    small = ["--train_for_env_steps=600", "--batch_size=256", "--rollout=16", "--num_envs_per_worker=8"]
    same_step = ["--env_kwargs", "autoreset_mode=SameStep"]
    flags = {
        "counter": ["--env=toy/Counter-v0", "--use_rnn=False", *small],
        "same_step": ["--env=toy/Counter-v0", "--use_rnn=False", *small, *same_step],
        "windowed": [f"--env={__name__}:Windowed", "--use_rnn=False", *small],
        "memory": ["--env=toy/Memory-v0", "--hidden_size=16", *small],
        "cartpole": ["--env=CartPole-v1", "--train_for_env_steps=30000"],
    }
    argvs = [[*common, f"--experiment={name}", *words] for name, words in flags.items()]
    process = subprocess.run(  # one process for all: torch takes longer to import than most of these runs
        [sys.executable, "-c", TRAIN_ALL, json.dumps(argvs)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return train_dir


def evaluation(runs: Path, experiment: str, **flags: Any) -> EvaluationConfig:
    defaults: dict[str, Any] = {"no_render": True, "seed": 7, "json": True}
    return EvaluationConfig(train_dir=str(runs), experiment=experiment, **(defaults | flags))


def enjoyed(capfd: pytest.CaptureFixture[str], runs: Path, *flags: str) -> dict[str, Any]:
    """What `enjoy --json` prints, which must be one JSON object and nothing else."""
    assert cli.enjoy([f"--train_dir={runs}", "--json", "--no_render", *flags]) == 0
    printed = capfd.readouterr().out
    assert printed.count("\n") == 1
    result: dict[str, Any] = json.loads(printed)
    return result


def copied(runs: Path, experiment: str, train_dir: Path, *places: str, config: dict[str, Any] | None = None) -> Path:
    """A run directory whose checkpoints at these places (folder/env steps) are the newest one of another run."""
    directory = train_dir / experiment
    directory.mkdir()
    flags = json.loads((runs / experiment / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(flags))
    loaded = checkpoint.load(runs / experiment / "checkpoint_p0")
    assert loaded is not None
    for place in places:
        folder, _, steps = place.rpartition("/")
        state = json.loads(loaded.files["state.json"]) | {"env_steps": int(steps)}
        files: dict[str, checkpoint.Content] = {**loaded.files, "state.json": json.dumps(state).encode()}
        checkpoint.save(directory / "checkpoint_p0" / folder, checkpoint.checkpoint_name(int(steps)), files)
    return directory


def spoil(path: Path) -> None:
    """Change one byte of a checkpoint's weights."""
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_same_seed_plays_the_same_episodes(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--experiment=memory", "--max_num_episodes=30")
    once, again = (enjoyed(capfd, runs, *flags, "--seed=3") for _ in range(2))
    other = enjoyed(capfd, runs, *flags, "--seed=4")
    assert once == again
    assert once["episodes"] != other["episodes"]
    returns = [episode["return"] for episode in once["episodes"]]
    assert len(returns) == once["num_episodes"] == 30
    assert once["mean"] == pytest.approx(np.mean(returns))
    assert once["std"] == pytest.approx(np.std(returns))
    assert once["median"] == np.median(returns)


def test_a_trained_policy_plays_better_than_chance(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--env=CartPole-v1", "--deterministic", "--seed=5")
    assert len(result["episodes"]) == 10
    assert result["mean"] > 100  # random actions reach 22
    assert result["env_steps"] >= 30_000
    assert all(episode["return"] == episode["length"] for episode in result["episodes"])


@pytest.mark.parametrize("experiment", ["counter", "same_step"])
def test_every_episode_is_reported_once_with_its_own_steps(
    runs: Path, capfd: pytest.CaptureFixture[str], experiment: str
) -> None:
    episodes = enjoyed(capfd, runs, f"--experiment={experiment}", "--max_num_episodes=25", "--seed=0")["episodes"]
    assert len(episodes) == 25
    for episode in episodes:
        assert episode["length"] in COUNTER_LENGTHS_ARE_IN
        assert episode["stats"]["length"] == episode["length"]
        assert episode["stats"]["true_reward"] == pytest.approx(episode["return"], abs=1e-4)


def test_frames_are_limited_too(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = enjoyed(capfd, runs, "--experiment=windowed", "--max_num_frames=8", "--max_num_episodes=0")
    assert [episode["length"] for episode in result["episodes"]] == [3, 3]
    nothing = enjoyed(capfd, runs, "--experiment=windowed", "--max_num_frames=2")
    assert (nothing["episodes"], nothing["mean"], nothing["median"]) == ([], None, None)


def test_the_newest_run_is_played_when_none_is_named(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert enjoyed(capfd, runs, "--max_num_episodes=1") != {}
    assert find_run(evaluation(runs, "")).directory.name == "cartpole"
    assert find_run(evaluation(runs, "", env="toy/Memory-v0")).directory.name == "memory"


def test_continuous_actions_are_their_means_when_asked(runs: Path) -> None:
    def actions(**flags: Any) -> list[float]:
        config = evaluation(runs, "windowed", **flags)
        run = find_run(config)
        envs = make_envs(run.config, config)
        player, _ = load_player(run, envs.spec, config, seed=1)
        obs, first = {"obs": np.ones((1, 2), np.float32)}, np.ones(1, np.bool_)
        envs.close()
        return [float(player.act(obs, first)[0, 0]) for _ in range(3)]

    assert len(set(actions())) == 3
    assert len(set(actions(continuous_actions_sample=False))) == 1
    assert actions(continuous_actions_sample=False) == actions(deterministic=True)


def test_the_recurrent_state_starts_afresh_with_every_episode(runs: Path) -> None:
    """Memory asks for a cue shown `delay` steps before: the state must be carried, and zeroed between episodes."""
    config = evaluation(runs, "memory", max_num_episodes=3)
    run = find_run(config)
    envs = make_envs(run.config, config)
    player, _ = load_player(run, envs.spec, config, seed=1)
    before: list[tuple[bool, float]] = []
    act = player.act

    def spying_act(obs: dict[str, Any], first: Any) -> Any:
        before.append((bool(first[0]), float(player.rnn_state.abs().sum())))
        return act(obs, first)

    player.act = spying_act  # type: ignore[method-assign]
    assert len(list(play(envs, player, config, seed=1))) == 3
    envs.close()
    assert [first for first, _ in before].count(True) == 3
    assert [magnitude > 0 for _, magnitude in before] == [False] + [True] * (len(before) - 1)
    fresh, _ = load_player(run, envs.spec, config, seed=1)
    obs = {"obs": np.zeros((1, 3), np.float32)}
    player.act, begins = act, np.ones(1, np.bool_)  # type: ignore[method-assign]
    player.act(obs, begins)
    fresh.act(obs, begins)
    assert np.array_equal(player.rnn_state.numpy(), fresh.rnn_state.numpy())


def test_a_window_shows_every_step(runs: Path) -> None:
    config = evaluation(runs, "windowed", no_render=False, json=False, max_num_episodes=4, fps=1000)
    run = find_run(config)
    envs = make_envs(run.config, config)
    player, _ = load_player(run, envs.spec, config, seed=1)
    module = sys.modules[__name__]
    before = module.Windowed.frames_shown
    assert [episode.length for episode in play(envs, player, config, seed=1)] == [3] * 4
    assert module.Windowed.frames_shown == before + 12
    envs.close()


def test_measuring_opens_no_window(runs: Path) -> None:
    config = evaluation(runs, "windowed", no_render=False, json=True)
    envs = make_envs(find_run(config).config, config)
    assert envs._envs[0].render_mode is None  # type: ignore[attr-defined]
    envs.close()


def test_training_never_opens_a_window(runs: Path) -> None:
    run = find_run(evaluation(runs, "windowed"))
    envs = make_group(run.config.env, 1)
    envs.reset([0], {"obs": np.zeros((1, 2), np.float32)})
    assert envs._envs[0].render_mode is None  # type: ignore[attr-defined]
    envs.close()


def test_text_has_a_line_per_episode_and_a_summary(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--experiment=memory", "--max_num_episodes=2", "--seed=1", "--no_render"]
    assert cli.enjoy([f"--train_dir={runs}", *flags]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("env steps, seed 1")
    assert [line.split()[0] for line in lines[1:4]] == ["episode", "1", "2"]
    assert lines[4].startswith("2 episodes: return ")


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ({"experiment": "nothing"}, UsageError, "there is no run"),
        ({"experiment": "", "env": "Acrobot-v1"}, UsageError, "no run of Acrobot-v1"),
        ({"experiment": "memory", "env": "CartPole-v1"}, UsageError, "is of toy/Memory-v0, not of --env=CartPole-v1"),
        ({"experiment": "memory", "policy_index": 1}, UsageError, "has 1 policies, counted from 0"),
    ],
)
def test_a_run_that_is_not_there(runs: Path, flags: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        find_run(evaluation(runs, **flags))


def test_a_run_without_a_usable_checkpoint_exits_6(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, copy = runs / "counter", tmp_path / "counter"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    config = evaluation(tmp_path, "counter")
    with pytest.raises(CheckpointError, match="has no checkpoint of policy 0 yet"):
        find_run(config)
    (newest,) = (source / "checkpoint_p0").glob("ckpt_*")
    damaged = copy / "checkpoint_p0" / newest.name
    damaged.mkdir(parents=True)
    for file in newest.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    spoil(damaged)
    flags = [f"--train_dir={tmp_path}", "--experiment=counter", "--no_render"]
    assert cli.run_command(lambda: cli.enjoy(flags)) == 6
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0].startswith("error: none of 1 checkpoints can be used")


def test_a_checkpoint_of_another_model_is_refused(runs: Path) -> None:
    config = evaluation(runs, "memory")
    run = find_run(config)
    other = run._replace(config=replace(run.config, model=replace(run.config.model, hidden_size=8)))
    envs = make_envs(other.config, config)
    with pytest.raises(UsageError, match="the checkpoint belongs to another model"):
        load_player(other, envs.spec, config, seed=1)
    envs.close()


# ---- which checkpoint


CHECKPOINTS = ("700", "600", "best/400", "milestones/100", "milestones/300", "milestones/500")


@pytest.mark.parametrize(
    ("flags", "env_steps"),
    [
        ((), 700),
        (("--load_checkpoint_kind=latest",), 700),
        (("--load_checkpoint_kind=best",), 400),
        (("--load_checkpoint_kind=milestone",), 500),
        (("--load_checkpoint_kind=milestone", "--milestone=500"), 500),
        (("--milestone=499",), 300),
        (("--milestone=300",), 300),
        (("--milestone=100",), 100),
        (("--milestone=1e9",), 500),
    ],
)
def test_the_checkpoint_that_is_asked_for_plays(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], env_steps: int
) -> None:
    directory = copied(runs, "counter", tmp_path, *CHECKPOINTS)
    result = enjoyed(capfd, tmp_path, "--experiment=counter", "--max_num_episodes=1", *flags)
    assert result["env_steps"] == env_steps
    folder = {700: ".", 400: "best"}.get(env_steps, "milestones")
    path = directory / "checkpoint_p0" / folder / f"ckpt_{env_steps:012d}"
    assert Path(result["checkpoint"]) == path


@pytest.mark.parametrize(
    ("flags", "exit_code", "text"),
    [
        (("--load_checkpoint_kind=best",), 6, "run counter has no best checkpoint of policy 0 yet"),
        (("--load_checkpoint_kind=milestone",), 6, "run counter has no milestone of policy 0 yet"),
        (("--milestone=5",), 6, "run counter has no milestone of policy 0 yet"),
        (("--load_checkpoint_kind=worst",), 2, "--load_checkpoint_kind=worst is not one of latest, best, milestone"),
        (("--load_checkpoint_kind=best", "--milestone=5"), 2, "--milestone=5 needs --load_checkpoint_kind=milestone"),
        (("--milestone=-1",), 2, "--milestone must be at least 0"),
    ],
)
def test_a_checkpoint_that_is_not_there(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], exit_code: int, text: str
) -> None:
    copied(runs, "counter", tmp_path, "700")
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", *flags]
    assert cli.run_command(lambda: cli.enjoy(argv)) == exit_code
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"error: {text}")


def test_no_milestone_is_as_early_as_that(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied(runs, "counter", tmp_path, *CHECKPOINTS)
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", "--milestone=99"]
    assert cli.run_command(lambda: cli.enjoy(argv)) == 2
    assert capfd.readouterr().err == "error: --milestone=99: the first milestone is at 100 env steps\n"


@pytest.mark.parametrize(
    ("folder", "flags", "newest", "older"),
    [
        ("", (), 700, 600),
        ("best", ("--load_checkpoint_kind=best",), 400, 350),
        ("milestones", ("--load_checkpoint_kind=milestone",), 500, 300),
        ("milestones", ("--milestone=400",), 300, 100),
    ],
)
def test_damaged_checkpoints_are_skipped_with_a_warning(
    runs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    folder: str,
    flags: tuple[str, ...],
    newest: int,
    older: int,
) -> None:
    directory = copied(runs, "counter", tmp_path, *CHECKPOINTS, "best/350")
    parent = directory / "checkpoint_p0" / folder
    spoil(parent / f"ckpt_{newest:012d}")
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", "--json", "--max_num_episodes=1", *flags]
    assert cli.enjoy(argv) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["env_steps"] == older
    assert printed.err.startswith(f"warning: damaged checkpoint skipped: {parent}/ckpt_{newest:012d}: ")
    for path in parent.glob("ckpt_*"):
        if path.name <= f"ckpt_{older:012d}":
            spoil(path)
    assert cli.run_command(lambda: cli.enjoy(argv)) == 6
    assert "checkpoints can be used" in capfd.readouterr().err


def test_a_run_that_is_still_training_is_played(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is written into its directory, and its lock is not touched."""
    directory = copied(runs, "counter", tmp_path, "700")
    with RunLock(directory / ".lock"):
        before = sorted(directory.rglob("*"))
        assert enjoyed(capfd, tmp_path, "--experiment=counter")["num_episodes"] == 10
        assert sorted(directory.rglob("*")) == before


# ---- how it plays


PARTS = (
    ActionPart("categorical", 5),
    ActionPart("categorical", 3),
    ActionPart("bernoulli", 4),
    ActionPart("gaussian", 2),
)


def test_the_most_probable_action_of_every_kind() -> None:
    spec = EnvSpec({"obs": ObservationSpec((3,), "float32")}, ActionSpec(PARTS, (-1.0, -1.0), (1.0, 1.0)))
    torch.manual_seed(0)
    flat = new_model(Config(), spec, "cpu")
    obs, first = {"obs": np.ones((1, 3), np.float32)}, np.ones(1, np.bool_)

    def actions(**flags: bool) -> np.ndarray:
        player = Player(flat, spec, EvaluationConfig(**flags), seed=1)
        return np.stack([player.act(obs, first)[0] for _ in range(60)])

    sampled, means, fixed = actions(), actions(continuous_actions_sample=False), actions(deterministic=True)
    assert fixed.shape == (60, 8)
    assert (fixed == fixed[0]).all()
    assert [len(np.unique(column)) > 1 for column in sampled.T] == [True] * 8
    assert [len(np.unique(column)) > 1 for column in means.T] == [True] * 6 + [False] * 2
    logits = flat.module.act({"obs": torch.ones(1, 3)}, torch.ones(1, dtype=torch.bool), torch.zeros(1, 512))[0][0]
    best = [int(logits[:5].argmax()), int(logits[5:8].argmax()), *(int(one > 0) for one in logits[8:12])]
    assert fixed[0][:6].tolist() == best
    assert fixed[0][6:].tolist() == pytest.approx(logits[12:14].tolist())


def test_actions_are_repeated_as_often_as_asked(runs: Path) -> None:
    config = evaluation(runs, "windowed", render_action_repeat=2, max_num_episodes=4)
    run = find_run(config)
    envs = make_envs(run.config, config)
    player, _ = load_player(run, envs.spec, config, seed=1)
    looks: list[bool] = []
    assert [episode.length for episode in play(envs, player, config, 1, looks.append)] == [3] * 4
    assert looks == [False, False, True] * 4  # two actions an episode: one for two steps, one for the last
    envs.close()


# ---- videos


def filmed(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, *flags: str) -> dict[str, Any]:
    copied(runs, "windowed", tmp_path, "700", config={"env": f"{__name__}:Drawn"})
    return enjoyed(capfd, tmp_path, "--experiment=windowed", f"--save_video={tmp_path / name}", *flags)


def steps_shown(path: Path) -> list[int]:
    """Which step of its episode every picture of a video shows."""
    return [round(float(picture[:35, :51].mean()) / 60) for picture in pictures_of(path)]


@pytest.mark.parametrize(
    ("flags", "episodes", "steps"),
    [
        ((), 1, [0, 1, 2, 3]),
        (("--max_num_episodes=2",), 2, [0, 1, 2, 3] * 2),
        (("--max_num_frames=8",), 2, [*[0, 1, 2, 3] * 2, 0, 1, 2]),
        (("--max_num_frames=6",), 2, [0, 1, 2, 3] * 2),
        (("--max_num_episodes=3", "--max_num_frames=4"), 1, [0, 1, 2, 3, 0, 1]),
        (("--render_action_repeat=2", "--max_num_episodes=2"), 2, [0, 2, 3] * 2),
    ],
)
@pytest.mark.parametrize("name", ["x.mp4", "x.gif"])
def test_a_video_shows_every_step_once_and_every_end(
    runs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    flags: tuple[str, ...],
    episodes: int,
    steps: list[int],
) -> None:
    result = filmed(runs, tmp_path, capfd, name, *flags)
    assert result["num_episodes"] == episodes
    rate = 10.0 if "--render_action_repeat=2" in flags else 20.0
    assert result["video"] == {"path": str(tmp_path / name), "pictures": len(steps), "fps": rate}
    assert steps_shown(tmp_path / name) == steps


def test_a_video_changes_nothing_of_what_is_played(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with_video = filmed(runs, tmp_path, capfd, "x.mp4", "--max_num_episodes=5", "--seed=3", "--fps=7")
    without = enjoyed(capfd, tmp_path, "--experiment=windowed", "--max_num_episodes=5", "--seed=3")
    assert with_video.pop("video")["fps"] == 7
    assert with_video == without
    assert len({episode["return"] for episode in without["episodes"]}) == 5


def test_the_text_says_where_the_video_is(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied(runs, "windowed", tmp_path, "700", config={"env": f"{__name__}:Drawn"})
    path = tmp_path / "videos" / "x.gif"
    assert cli.enjoy([f"--train_dir={tmp_path}", "--experiment=windowed", f"--save_video={path}"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"video: {path}, 4 pictures at 20 per second"
    assert [file.name for file in path.parent.iterdir()] == ["x.gif"]


@pytest.mark.parametrize(
    ("experiment", "flags", "text"),
    [
        ("windowed", (), r"cannot be filmed: no rgb_array among its render modes (human)"),
        ("counter", (), "toy/Counter-v0 cannot be filmed"),
        ("counter", ("--save_video=x.avi",), "--save_video=x.avi: the name must end in .mp4 or .gif"),
        ("counter", ("--max_num_episodes=0",), "--save_video with --max_num_episodes=0 needs --max_num_frames"),
    ],
)
def test_what_cannot_be_filmed_is_one_line(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], experiment: str, flags: tuple[str, ...], text: str
) -> None:
    argv = [f"--train_dir={runs}", f"--experiment={experiment}", f"--save_video={tmp_path}/x.mp4", *flags]
    assert cli.run_command(lambda: cli.enjoy(argv)) == 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: ")
    assert text in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_video_needs_no_display(runs: Path, tmp_path: Path) -> None:
    """As a person makes one on a machine without a screen, saying nothing of that."""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = tmp_path / "x.mp4"
    command = [sys.executable, str(ROOT / "enjoy_appo.py"), "--env=CartPole-v1", f"--train_dir={runs}"]
    done = subprocess.run(
        [*command, f"--save_video={path}", "--seed=1", "--max_num_frames=20", "--max_num_episodes=1"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pictures = pictures_of(path)
    assert f"{len(pictures)} pictures at 50 per second" in done.stdout
    assert len(pictures) in range(10, 22)
    assert {picture.shape for picture in pictures} == {(400, 600, 3)}
    assert len({picture.tobytes() for picture in pictures}) > 5
