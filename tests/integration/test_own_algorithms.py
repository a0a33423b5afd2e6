"""The algorithms of examples/ that docs/own_algorithm.md explains: trained from the command line, resumed, enjoyed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from appo.algorithms import cli
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.parts.learner import ActorCriticLearner
from appo.algorithms.run.algorithms import find_algorithm
from appo.algorithms.runtime.algorithm import Context
from examples.spo import SPOLearner
from tests.integration.enjoying import enjoyed
from tests.integration.runs import ROOT, Run, command_line, run_command
from tests.markdown import blocks
from tests.states import stacked
from tests.unit.appo.batches import COLUMNS, ROLLOUT, SPEC, batch_of
from tests.unit.models.cases import context_of, model_of

PAGE = ROOT / "docs" / "own_algorithm.md"
BATCH = 256
SMALL: dict[str, object] = {
    "env": "CartPole-v1",
    "inference": "serial",
    "num_envs_per_worker": 8,
    "rollout": 32,
    "batch_size": BATCH,
    "num_batches_per_iteration": 1,
    "use_rnn": False,
    "encoder_mlp_layers": 16,
}
ALGORITHMS: dict[str, dict[str, object]] = {
    "examples.spo:SPO": {"spo_epsilon": 0.3, "ppo_epochs": 2},
    "examples.reward_prediction:RewardPrediction": {"reward_loss_coeff": 0.2, "ppo_epochs": 2},
    "examples.rnd:RND": {"novelty_coeff": 0.5, "ppo_epochs": 2},
    "examples.reinforce:REINFORCE": {"baseline": False},
}
BATCHES = 4  # of a start


def train(directory: Path, **flags: object) -> Run:
    """Train as `appo train` does, in this process."""
    assert cli.run_command(lambda: cli.run("train", command_line(directory, **flags))) == 0
    return Run(directory)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_it_trains_goes_on_and_plays(tmp_path: Path, algo: str, capfd: pytest.CaptureFixture[str]) -> None:
    own = ALGORITHMS[algo]
    epochs = own.get("ppo_epochs", 1)
    first = train(tmp_path / "run", **SMALL, **own, algo=algo, train_for_env_steps=BATCHES * BATCH)
    kept, before = first.checkpoint(), first.totals
    second = train(tmp_path / "run", train_for_env_steps=2 * BATCHES * BATCH)  # the run knows its algorithm and flags
    after = second.totals
    assert {"algo": algo, **own}.items() <= second.config.items()
    assert before["updates"] == before["batches"] * epochs
    assert after["updates"] - before["updates"] == after["batches"] * epochs
    for totals, goal in ((before, BATCHES), (after, 2 * BATCHES)):
        assert goal * BATCH <= totals["samples"] == totals["used"] < (goal + 1) * BATCH  # each step once
    assert {f"train/{name}" for name in find_algorithm(algo).metrics} <= second.metrics[-1].keys()
    weights = load(kept["model.safetensors"])
    assert not any(np.array_equal(weights[name], now) for name, now in second.weights().items() if "weight" in name)
    capfd.readouterr()
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--max_num_episodes=2", "--seed=1")
    assert played["num_episodes"] == 2
    if algo == "examples.rnd:RND":
        check_own_vectors(load(kept["optimizer.safetensors"]), load(second.checkpoint()["optimizer.safetensors"]))


def check_own_vectors(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """The networks of RND went on from the checkpoint: one is fixed, the other was trained by steps that add up."""
    target, predictor = (f"networks.rnd_{name}.0.weight" for name in ("target", "predictor"))
    assert np.array_equal(before[target], after[target])
    assert before[target].any()
    assert before["rnd_unit"] == after["rnd_unit"] > 0
    assert not np.array_equal(before[predictor], after[predictor])
    assert before["rnd_predictor.exp_avg.0.weight"].shape == before[predictor].shape == (64, 4)
    steps = [vectors["rnd_predictor.adam_steps"].item() for vectors in (before, after)]
    assert BATCHES <= steps[0] <= BATCHES + 1
    assert 2 * BATCHES <= steps[1] <= 2 * BATCHES + 2


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["examples.rnd:RND", "examples.reinforce:REINFORCE"])
def test_it_trains_in_processes_and_goes_on(tmp_path: Path, algo: str) -> None:
    flags = SMALL | ALGORITHMS[algo] | {"inference": "local", "num_workers": 2}
    for budget in (2_000, 4_000):
        run = run_command(tmp_path / "run", **flags, algo=algo, train_for_env_steps=budget)
        assert run.returncode == 0, run.stderr
        assert run.totals["samples"] >= budget


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_it_learns_cart_pole(tmp_path: Path, algo: str) -> None:
    flags = {"env": "CartPole-v1", "inference": "serial", "train_until_return": 150, "train_for_env_steps": 400_000}
    assert train(tmp_path / "run", **flags, algo=algo).reached_return >= 150


def learner_of(algo: str, **flags: object) -> ActorCriticLearner:
    """Make a learner of a small recurrent model; all of one seed."""
    algorithm = find_algorithm(algo)
    sizes = {"rollout": ROLLOUT, "recurrence": 4, "batch_size": ROLLOUT * COLUMNS, "learning_rate": 1e-2}
    torch.manual_seed(3)
    model = model_of(SPEC, seed=0)
    if "reward" in algo:
        model.reward_head = torch.nn.Linear(model.value_head.in_features, 1)
    return algorithm.learner_class()(FlatModule(model), context_of(algorithm.flags(**sizes, **flags), SPEC))  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_training_goes_on_from_a_state_bit_by_bit(algo: str) -> None:
    learner, again = learner_of(algo), learner_of(algo)
    batch = batch_of(learner.model)
    assert len(list(learner.learn(batch, 0.0))) == learner.updates == 1
    state = learner.state()
    assert {name: vector.shape for name, vector in state.vectors.items()} == {
        name: vector.shape for name, vector in learner.layout.vectors.items()
    }
    for _, tensor, _ in again._named_tensors():
        tensor.fill_(7.0)
    again.restore(state)
    for one in (learner, again):
        list(one.learn(batch, 0.0))
    first, second = learner.state(), again.state()
    assert first.meta == second.meta
    assert all(np.array_equal(first.vectors[name], second.vectors[name]) for name in first.vectors)
    assert not np.array_equal(stacked(first), stacked(state))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_memory_is_reserved_for_what_the_learner_saves(algo: str) -> None:
    learner, algorithm = learner_of(algo), find_algorithm(algo)
    assert algorithm.layout(learner.context, learner.flat) == learner.layout


def test_the_parabola_of_spo_is_lowest_where_the_paper_says() -> None:
    learner = learner_of("examples.spo:SPO", spo_epsilon=0.25)
    assert isinstance(learner, SPOLearner)
    advantage = torch.tensor([[2.0, -0.5, 0.0]])
    ratio = torch.tensor([[1.25, 0.75, 3.0]], requires_grad=True)
    loss = learner.policy_loss(ratio, advantage)
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    assert slope.tolist() == [[0.0, 0.0, 0.0]]
    for place, (r, a) in enumerate(zip(ratio[0].tolist(), advantage[0].tolist(), strict=True)):
        assert loss[0, place].item() == pytest.approx(-(r * a - abs(a) / (2 * 0.25) * (r - 1) ** 2))


def test_the_auxiliary_loss_adds_its_share_in_parts_too() -> None:
    algo = "examples.reward_prediction:RewardPrediction"
    gradients = {}
    for size in (0, 2 * ROLLOUT):
        for coefficient in (0.0, 0.5):
            learner = learner_of(algo, microbatch_size=size, reward_loss_coeff=coefficient)
            _, metrics = learner.differentiate(batch_of(learner.model))  # type: ignore[attr-defined]
            gradients[size, coefficient] = learner.optimizer.gradient.clone()
            assert metrics["reward_loss"] > 0
    whole, parts = (gradients[size, 0.5] - gradients[size, 0.0] for size in (0, 2 * ROLLOUT))
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-6)
    assert whole.abs().max() > 1e-3


def test_what_is_predicted_earns_less_and_less() -> None:
    learner = learner_of("examples.rnd:RND", novelty_coeff=1.0)
    batch = batch_of(learner.model)
    rewards: list[torch.Tensor] = []
    targets = learner.returns  # type: ignore[attr-defined]

    def returns(given, *others):  # type: ignore[no-untyped-def]
        rewards.append(given.reward - batch.reward)
        return targets(given, *others)

    learner.returns = returns  # type: ignore[attr-defined]
    for _ in range(20):
        list(learner.learn(batch, 0.0))
    assert rewards[0][batch.valid].mean().item() == pytest.approx(1.0)
    assert rewards[-1][batch.valid].mean() < 0.5
    assert all((bonus[batch.valid] >= 0).all() for bonus in rewards)


@pytest.mark.parametrize("baseline", [True, False])
def test_reinforce_follows_the_returns(baseline: bool) -> None:
    """Against sums written out step by step; `value` and `final` are what the critic says of each observation."""
    learner = learner_of("examples.reinforce:REINFORCE", baseline=baseline, gamma=0.9, max_grad_norm=0.0)
    batch = batch_of(learner.model)
    before = learner_of("examples.reinforce:REINFORCE")
    policy, values = before.unroll(batch)
    log_prob, loss = policy.log_prob(torch.where(batch.valid.unsqueeze(-1), batch.action, 0)), torch.zeros(())
    for column in range(COLUMNS):
        total = values[-1, column].item()
        for t in reversed(range(ROLLOUT)):
            if not batch.valid[t, column]:
                continue
            if batch.terminated[t, column]:
                total = 0.0
            elif batch.truncated[t, column] or t == ROLLOUT - 1 or not batch.valid[t + 1, column]:
                total = values[t + 1, column].item()
            total = batch.reward[t, column].item() + 0.9 * total
            weight = total - values[t, column].item() * baseline
            loss = loss - log_prob[t, column] * weight + 0.5 * (values[t, column] - total) ** 2
    (loss / batch.valid.sum()).backward()  # type: ignore[no-untyped-call]
    assert len(list(learner.learn(batch, 0.0))) == 1
    assert torch.allclose(learner.optimizer.gradient, before.optimizer.gradient, rtol=1e-4, atol=1e-6)


def test_a_rate_that_follows_a_divergence_nobody_measures_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--algo=examples.reinforce:REINFORCE", "--env=CartPole-v1", "--lr_schedule=kl_adaptive_epoch"]
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    message = "error: --lr_schedule=kl_adaptive_epoch: --algo=REINFORCE measures no KL divergence\n"
    assert capfd.readouterr().err == message


class NoValues(APPO):
    """An algorithm whose learner reads values that its network lacks."""

    def make_model(self, context: Context) -> FlatModule:
        return FlatModule(build_policy_network(context.model, context.spec))


def test_a_network_without_values_is_refused_where_the_learner_reads_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = command_line(tmp_path / "run", **SMALL, algo=f"{__name__}:NoValues")
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    message = "error: APPOLearner needs a network with values, an ActorCritic"
    assert message in capfd.readouterr().err.splitlines()


def test_the_page_shows_whole_files_of_at_most_sixty_lines() -> None:
    shown = {block.file: block.text.partition("\n")[2] for block in blocks(PAGE) if block.file}
    files = {f"examples/{name.partition(':')[0].partition('.')[2]}.py" for name in ALGORITHMS}
    assert shown.keys() == files | {"examples/replay.py", "examples/sac.py"}
    for name, text in shown.items():
        assert text == (ROOT / str(name)).read_text()
        assert text.count("\n") <= (120 if name == "examples/sac.py" else 60)


PENDULUM: dict[str, object] = {
    "env": "Pendulum-v1",
    "algo": "examples.sac:SAC",
    "inference": "serial",
    "num_envs_per_worker": 2,
    "auto_tune": False,
    "batch_size": 16,
    "learning_starts": 100,
    "replay_capacity": 1000,
    "save_replay": True,
    "encoder_mlp_layers": 8,
    "critic_learning_rate": 1e-2,
}


def test_soft_actor_critic_squashes_unknown_actions_and_refuses_choices(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = PENDULUM | {"env": "tests.reaching:Reach", "env_kwargs": '{"numbers": [0]}', "train_for_env_steps": 150}
    run = train(tmp_path / "run", **flags)
    assert run.config["action_distribution"] == "tanh_gaussian"
    assert run.totals["updates"] > 0
    capfd.readouterr()
    words = ["--algo=examples.sac:SAC", "--env=CartPole-v1", f"--train_dir={tmp_path}"]
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    message = "error: --algo=OwnSAC needs continuous actions, the environment has choices: take APEX, PQN, APPO or PPO"
    assert message in capfd.readouterr().err


def test_soft_actor_critic_trains_on_the_replay_goes_on_and_plays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path / "run", **PENDULUM, train_for_env_steps=200)
    before, kept = first.totals, load(first.checkpoint()["optimizer.safetensors"])
    second = train(tmp_path / "run", train_for_env_steps=300)
    after, vectors = second.totals, load(second.checkpoint()["optimizer.safetensors"])
    assert before["samples"] >= 200
    assert after["samples"] >= 300
    assert before["used"] == 16 * before["updates"] > 0  # one update per step once training begins
    assert abs(before["updates"] - (before["samples"] - 100)) <= 2
    assert after["updates"] - before["updates"] == pytest.approx(after["samples"] - before["samples"], abs=2)
    for name in ("critics", "log_alpha"):
        assert kept[f"{name}.adam_steps"] == before["updates"]
        assert vectors[f"{name}.adam_steps"] == after["updates"]
    assert second.metrics[-1]["train/critics_learning_rate"] == 1e-2
    critics, target = (
        {k: v for k, v in vectors.items() if k.startswith(f"networks.{n}.")} for n in ("critics", "target")
    )
    assert len(critics) == len(target) > 0
    assert not any(np.array_equal(kept[name], weight) for name, weight in target.items())
    capfd.readouterr()
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--max_num_episodes=2", "--seed=1")
    assert played["num_episodes"] == 2
    words = [f"--train_dir={tmp_path}", "--experiment=run", "--train_for_env_steps=400", "--reward_scale=10"]
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    assert "run run cannot change reward_scale 1 -> 10: the rewards in its replay are scaled" in capfd.readouterr().err
    assert cli.run_command(lambda: cli.run("train", [*words[:-1], "--no_done_at_end"])) == 2
    assert "cannot change no_done_at_end False -> True: its replay has the ends of epi" in capfd.readouterr().err
    assert train(tmp_path / "run", train_for_env_steps=400).config["reward_scale"] == 1.0
