"""A policy in a loop of one's own: the actions of enjoy, its memory, its weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import appo
from appo import Policy, load_policy, train
from appo.algorithms.playing.player import Player, load_player
from appo.algorithms.playing.policy import look_at
from appo.algorithms.playing.saved_run import find_run
from appo.algorithms.run.folder import MARK
from appo.algorithms.run.trust import marked
from appo.envs import make
from appo.envs.config import EnvConfig
from appo.utils.errors import CheckpointError, NotFinite, SpaceMismatch, UsageError
from tests.integration.enjoying import evaluation
from tests.markdown import ROOT, blocks

STEPS = 1000


def enjoying_player(runs: Path, experiment: str, policy: Policy, **flags: Any) -> Player:
    """What enjoy plays with."""
    config = evaluation(runs, experiment, **flags)
    return load_player(find_run(config), policy.spec, config, seed=5)[0]


@pytest.mark.parametrize("experiment", ["cartpole", "memory", "windowed"])
def test_it_acts_as_enjoy_does(runs: Path, experiment: str) -> None:
    """1,000 observations in a row, of episodes that begin now and then; the same random numbers."""
    policy = load_policy(runs / experiment, seed=5)
    player = enjoying_player(runs, experiment, policy)
    random = np.random.default_rng(1)
    shape = policy.spec.observations["obs"].shape
    for step in range(STEPS):
        observation = random.normal(size=shape).astype(np.float32)
        first, deterministic = step == 0 or random.random() < 0.05, step % 2 == 0
        if first:
            policy.reset()
        expected = player.act({"obs": observation[None]}, np.array([first]), deterministic=deterministic)[0]
        action = policy.act(observation, deterministic=deterministic)
        assert np.array_equal(np.ravel(action), np.clip(expected, -1, 1) if experiment == "windowed" else expected)
    assert np.array_equal(policy._player.rnn_state, player.rnn_state)


def test_a_batch_is_its_rows(runs: Path) -> None:
    observations = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    first = np.zeros((6, 4), np.bool_)
    first[3, 1] = True
    batch, alone = load_policy(runs / "memory"), load_policy(runs / "memory")
    together = [
        batch.act_batch(o, first=f, deterministic=True).tolist() for o, f in zip(observations, first, strict=True)
    ]
    for row in range(4):
        alone.reset()
        for step in range(6):
            if first[step, row]:
                alone.reset()
            assert alone.act(observations[step, row], deterministic=True) == together[step][row]


@pytest.mark.parametrize("experiment", ["cartpole", "memory"])
def test_an_action_is_computed_with_the_state_that_is_given(runs: Path, experiment: str) -> None:
    """Two episodes, taking turns: each has the actions that it has alone, and nothing stays inside."""
    policy, alone = load_policy(runs / experiment), load_policy(runs / experiment)
    size = policy.model.rnn_state_size
    shape = policy.spec.observations["obs"].shape
    observations = np.random.default_rng(0).normal(size=(2, 12, *shape)).astype(np.float32)
    expected = []
    for episode in observations:
        alone.reset()
        expected.append([alone.act(observation, deterministic=True) for observation in episode])
    states: list[Any] = [None, None]
    before = policy._player.rnn_state.clone()
    for step in range(12):
        for episode in range(2):
            found = policy.compute_action(observations[episode, step], states[episode], deterministic=True)
            states[episode] = found.state
            assert found.action == expected[episode][step] == found.logits.argmax()
            assert found.state.shape == (size,)
            assert np.isfinite(found.value)
    assert torch.equal(policy._player.rnn_state, before)
    if size:
        assert states[0].any()
        fresh = policy.compute_action(observations[0, -1], deterministic=True)
        assert not np.array_equal(fresh.logits, policy.compute_action(observations[0, -1], states[0]).logits)
    with pytest.raises(UsageError, match=rf"state must have {size} numbers, got shape \({size + 1},\)"):
        policy.compute_action(observations[0, 0], np.zeros(size + 1))


def test_sampled_actions_follow_the_logits(runs: Path) -> None:
    policy = load_policy(runs / "cartpole", seed=3)
    observation = np.array([0.0, 0.5, 0.0, -0.5], np.float32)
    found = [policy.compute_action(observation) for _ in range(400)]
    probability = np.exp(found[0].logits[1]) / np.exp(found[0].logits).sum()
    assert np.mean([one.action for one in found]) == pytest.approx(probability, abs=0.1)


def test_a_running_training_answers_observations(tmp_path: Path) -> None:
    """By the weights of now, with the policy of its newest checkpoint."""
    flags = {"env": "CartPole-v1", "experiment": "run", "train_dir": str(tmp_path), "inference": "serial", "seed": 1}
    with appo.Training(flags, use_rnn=False, train_for_env_steps=10**9, report_seconds=0.1, plot=False) as run:
        for _ in run:
            run.save()
            policy = load_policy(run.directory)
            policy.set_weights(run.weights())
            break
    assert policy.compute_action(np.zeros(4, np.float32)).logits.shape == (2,)


def test_rows_must_stay_the_same_until_reset(runs: Path) -> None:
    policy = load_policy(runs / "memory")
    policy.act_batch(np.zeros((3, 3), np.float32))
    with pytest.raises(UsageError, match="2 rows after 3: call reset"):
        policy.act_batch(np.zeros((2, 3), np.float32))
    policy.reset()
    assert policy.act_batch(np.zeros((2, 3), np.float32)).shape == (2,)
    with pytest.raises(SpaceMismatch, match=r"expected shape \(3,\), got shape \(4,\)"):
        policy.act(np.zeros(4, np.float32))
    with pytest.raises(UsageError, match=r"first: expected 2 values, one per row, got the shape \[2, 1\]"):
        policy.act_batch(np.zeros((2, 3), np.float32), first=[[True], [False]])
    for no_batch in (np.float32(3), np.array(3.0), 3):
        with pytest.raises(UsageError, match="expected a batch of observations, got a "):
            policy.act_batch(no_batch)


def test_three_lines_play_a_game(runs: Path) -> None:
    policy = load_policy("cartpole", train_dir=runs, seed=1)
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=1)
    steps, over = 0, False
    while not over:
        observation, _, terminated, truncated, _ = env.step(policy.act(observation, deterministic=True))
        steps, over = steps + 1, terminated or truncated
    assert steps > 100  # random actions reach 22
    assert policy.env_steps >= 30_000
    made = policy.make_env()
    assert made.observation_space == policy.observation_space == env.observation_space
    made.close()


def test_weights_travel(runs: Path) -> None:
    policy, other = load_policy(runs / "counter"), load_policy(runs / "counter")
    weights = policy.get_weights()
    name = "policy_head.linear.bias"
    weights[name][:] = [100.0] + [-100.0] * (len(weights[name]) - 1)
    assert policy.get_weights()[name].max() < 10  # copies
    other.set_weights(weights)
    assert {int(other.act(np.zeros(policy.spec.observations["obs"].shape, np.float32))) for _ in range(20)} == {0}
    with pytest.raises(
        UsageError, match=r"no weights policy_head\.linear\.bia; did you mean policy_head\.linear\.bias"
    ):
        other.set_weights(weights | {"policy_head.linear.bia": 0})
    with pytest.raises(UsageError, match=rf"weights {name} must have shape .*, got \(1,\)"):
        other.set_weights(weights | {name: np.zeros(1)})
    with pytest.raises(UsageError, match=f"weights {name} are not finite"):
        other.set_weights(weights | {name: weights[name] * np.nan})
    del weights[name]
    with pytest.raises(UsageError, match=f"weights {name} must have shape .*, got none"):
        other.set_weights(weights)


def test_a_policy_plays_with_the_flags_of_learning_of_its_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = find_run(evaluation(runs, "counter"))
    config = replace(run.config, population=replace(run.config.population, per_policy={"gamma": [0.5]}))
    seen: list[float] = []
    kind, make_model = type(config.algorithm), type(config.algorithm).make_model

    def noting(self: Any, context: Any) -> Any:
        seen.append(context.flags.gamma)
        return make_model(self, context)

    monkeypatch.setattr(kind, "make_model", noting)
    load_player(run._replace(config=config), look_at(config.env)[1], evaluation(runs, "counter"), 0)
    assert seen == [0.5]


def test_the_callers_random_numbers_and_threads_stay(runs: Path) -> None:
    torch.manual_seed(3)
    expected, threads = torch.rand(1), torch.get_num_threads() + 1
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    load_policy(runs / "counter").act(
        np.zeros(look_at(find_run(evaluation(runs, "counter")).config.env)[1].observations["obs"].shape, np.float32)
    )
    kept = torch.get_num_threads()
    torch.set_num_threads(threads - 1)
    assert torch.rand(1) == expected
    assert kept == threads


def test_with_spaces_no_environment_is_made(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("made an environment")

    monkeypatch.setattr("appo.algorithms.playing.policy.make_single", refuse)
    monkeypatch.setattr(make, "make_single", refuse)
    seen = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32)
    assert load_policy(runs / "windowed", spaces=seen).act(np.zeros(2, np.float32)).shape == (1,)
    with pytest.raises(UsageError, match="belongs to another model"):
        load_policy(runs / "windowed", spaces=(seen[0], spaces.Discrete(3)))


def test_given_spaces_mean_what_those_of_the_environment_mean() -> None:
    """A number of a policy whose actions are not clipped is one of the environment, not a share of its bounds."""
    box = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Box(-2.0, 2.0, (1,), np.float32)
    for clips in (True, False):
        config = EnvConfig(env="Pendulum-v1", clip_actions=clips)
        (_, space), spec = look_at(config, box)
        assert (space, spec.action) == (look_at(config)[0][1], look_at(config)[1].action)
        assert spec.action.scale == (2.0 if clips else 1.0,)


EVIL = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nclass Env: pass\n"


def harmless(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"env": "CartPole-v1"}))


def marked_by_the_user(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(marked({name: config[name] for name in config if name != MARK})))


@pytest.mark.parametrize(
    "swap",
    [shutil.rmtree, lambda folder: (folder / "config.json").unlink(missing_ok=True), harmless, marked_by_the_user],
    ids=["no folder", "no config", "a harmless one", "a marked one"],
)
@pytest.mark.parametrize("env", ["evil_of_policy:Env", "gymnasium.envs.classic_control:CartPoleEnv"])
def test_the_environment_of_a_stranger_is_refused_whatever_becomes_of_the_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path], object], env: str
) -> None:
    """Trust is asked of the flags that were read, which are those that are used."""
    (tmp_path / "evil_of_policy.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(runs / "cartpole", tmp_path / "runs" / "cartpole")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"env": env}))
    own = gymnasium.make("CartPole-v1")
    policy = load_policy(folder, spaces=(own.observation_space, own.action_space))
    for _ in range(2):
        with pytest.raises(UsageError, match=f"^run cartpole has no mark of yours, .* would use env={env}: --trust"):
            policy.make_env()
        if folder.exists():
            swap(folder)
    assert not (tmp_path / "evil_of_policy.ran").exists()
    own.close()


def test_an_environment_that_may_be_made_is_whatever_becomes_of_the_run(runs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(runs / "cartpole", tmp_path / "runs" / "cartpole")
    own = gymnasium.make("CartPole-v1")
    policy = load_policy(folder, spaces=(own.observation_space, own.action_space))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"env": "evil:Env"}))
    made = policy.make_env()
    assert made.spec is not None
    assert made.spec.id == "CartPole-v1"
    made.close()
    own.close()


def test_masks_are_obeyed(runs: Path) -> None:
    policy = load_policy(runs / "memory", seed=0)
    choices = policy.action_space.n
    for allowed in range(choices):
        mask = np.eye(choices, dtype=np.int8)[allowed]
        assert {policy.act(np.zeros(3, np.float32), action_mask=mask) for _ in range(5)} == {allowed}
    with pytest.raises(UsageError, match="action_mask must have"):
        policy.act(np.zeros(3, np.float32), action_mask=np.ones(choices + 1))
    with pytest.raises(UsageError, match="action_mask: expected at least one allowed choice, got all zero"):
        policy.act(np.zeros(3, np.float32), action_mask=[0] * choices)
    nobody = np.zeros((2, choices), np.int8)  # as vector environments show it of rows that have ended
    policy.reset()
    assert policy.act_batch(np.zeros((2, 3), np.float32), action_mask=nobody).shape == (2,)


def test_observations_that_are_not_finite_are_refused_and_leave_the_memory(runs: Path) -> None:
    policy = load_policy(runs / "memory")
    policy.act_batch(np.ones((2, 3), np.float32))
    before = policy._player.rnn_state.clone()
    for value in (np.nan, np.inf):
        bad = np.array([[1.0, 1.0, 1.0], [1.0, value, 1.0]], np.float32)
        with pytest.raises(NotFinite, match=r"env 1: observation key obs is not finite: (nan|inf) at \[1\]"):
            policy.act_batch(bad)
        for act in (policy.act, policy.compute_action):
            with pytest.raises(NotFinite, match="env 0: observation key obs is not finite"):
                act(bad[1])
    assert torch.equal(policy._player.rnn_state, before)


def test_what_is_not_there(runs: Path) -> None:
    with pytest.raises(UsageError, match="no run nothing, neither in"):
        load_policy("nothing", train_dir=runs)
    with pytest.raises(CheckpointError, match="has no milestone"):
        load_policy(runs / "counter", which="milestone")
    with pytest.raises(UsageError, match="has 1 policies, counted from 0"):
        load_policy(runs / "counter", policy=1)
    kinds = "latest, best, best_evaluated, milestone, past; did you mean best"
    with pytest.raises(UsageError, match=f"load_checkpoint_kind=bestest is not one of {kinds}"):
        load_policy(runs / "counter", which="bestest")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="device=tpu is not one of auto, cpu, cuda"):
        load_policy(runs / "counter", device="tpu")
    with pytest.raises(UsageError, match="policy_index must be at least 0, got -1"):
        load_policy(runs / "counter", policy=-1)
    with pytest.raises(AttributeError, match="no attribute 'load_polici'"):
        _ = appo.load_polici


def test_the_page_shows_the_arithmetic_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page as it stands there, on observations far outside of those that were seen too."""
    flags = {"env": "CartPole-v1", "experiment": "CartPole-v1_1", "train_dir": tmp_path / "train_dir", "seed": 1}
    result = train(flags, train_for_env_steps=600, inference="serial", num_workers=1, tensorboard=False, plot=False)
    (block,) = (block for block in blocks(ROOT / "docs/export.md") if "model.safetensors" in block.text)
    monkeypatch.chdir(tmp_path)
    shown: dict[str, Any] = {}
    exec(block.text, shown)
    policy = load_policy(result.directory)
    observations = np.random.default_rng(1).normal(scale=5.0, size=(200, 4)).astype(np.float32)
    scaled = (observations - shown["w"]["scalings.0.mean"].numpy()) * shown["w"]["scalings.0.inv_std"].numpy()
    assert (np.abs(scaled) > 10).any(axis=1).sum() > 50
    with torch.no_grad():
        for observation in observations:
            logits, value = shown["forward"](torch.from_numpy(observation[None]))
            computed = policy.compute_action(observation)
            assert np.array_equal(logits[0].numpy(), computed.logits)
            assert value.item() == pytest.approx(computed.value, rel=1e-6)
