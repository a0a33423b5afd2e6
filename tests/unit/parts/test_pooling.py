"""Several learners with a part of every batch each make the steps of one learner with the whole batch."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.appo.numpy_learner import numpy_update
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.normalization import Moments, merge_batch
from appo.algorithms.parts.learner import FlatLearner
from appo.algorithms.parts.pooling import pool_moments
from appo.algorithms.runtime.learning.batches import Batch, GroupBroken
from appo.algorithms.sac.learner import SACLearner
from appo.envs.spec import EnvSpec
from tests.patience import HANG_SECONDS
from tests.unit.apex import test_learner as apex
from tests.unit.appo import batches as appo
from tests.unit.models.cases import CORES, GAUSSIAN, IMAGE, context_of, env_spec_of, model_of
from tests.unit.ppo import test_learner as ppo
from tests.unit.runtime.learning.test_rank_group import Ranks as GlooRanks
from tests.unit.sac import test_learner as sac

COLUMNS, STEPS, RATE = 8, 20, 0.02
SPECS = {"mlp": ({}, env_spec_of()), "conv": ({}, env_spec_of(obs=IMAGE)), "gru": ({"core": "gru"}, env_spec_of())}


class Threads:
    """Ranks that are threads of this process; sums are in the order of the ranks."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=HANG_SECONDS), dict[int, Tensor]()

    def of(self, rank: int) -> "Thread":
        return Thread(self, rank)


class Thread:
    def __init__(self, all_ranks: Threads, rank: int) -> None:
        self.all_ranks, self.rank, self.sums = all_ranks, rank, list[tuple[int, torch.dtype]]()

    def add_up(self, x: Tensor) -> None:
        given, barrier = self.all_ranks.given, self.all_ranks.barrier
        self.sums.append((x.numel(), x.dtype))
        given[self.rank] = x.clone()
        barrier.wait()
        total = torch.stack([given[rank] for rank in sorted(given)]).sum(0)
        barrier.wait()
        x.copy_(total)


def plain_descent(learner: FlatLearner) -> None:
    """Let the learner follow the gradient itself: Adam would hide its length."""

    def descend(skipped: Tensor) -> None:
        if not skipped:
            learner.optimizer.weights.sub_(RATE * learner.optimizer.gradient)

    learner.optimizer._adam = descend  # type: ignore[method-assign, union-attr, assignment]


def appo_learner(kind: str, columns: int, **flags: object) -> APPOLearner:
    (of_core, spec), size = SPECS[kind], columns * appo.ROLLOUT
    model = {**CORES[str(of_core.get("core", "none"))], "normalize_input": True}
    flat = FlatModule(model_of(spec, **model))
    config = appo.learning(batch_size=size, max_grad_norm=0.3, exploration_loss_coeff=0.01, **flags)
    learner = APPOLearner(flat, context_of(config, spec))
    return learner.accelerate(numpy_update) if kind == "mlp" else learner


def ppo_learner(kind: str, columns: int, **flags: object) -> FlatLearner:
    of_core, spec = SPECS[kind]
    sizes = {"batch_size": columns * appo.ROLLOUT, "num_batches_per_iteration": 1, "ppo_epochs": 1}
    normalize = {"normalize_input": True, "normalize_returns": True}
    return ppo.learner_of(spec, **of_core, quick=kind == "mlp", **normalize, **sizes, **flags)  # type: ignore[arg-type]


def batch_of(kind: str, seed: int) -> Batch:
    (of_core, spec) = SPECS[kind]
    model = model_of(spec, **CORES[str(of_core.get("core", "none"))])
    batch = appo.batch_of(model, spec, columns=COLUMNS, seed=seed)
    batch.valid[:, 1] = False  # ranks have different numbers of valid steps
    return batch


def train(
    make: Callable[[int], FlatLearner], ranks: int, batches: Sequence[Batch], sums: Callable[[int], Any] | None = None
) -> list[FlatLearner]:
    """Train on shares of the batches, by the sums of each rank; the learners of all ranks."""
    sums, share = sums or Threads(ranks).of, batches[0].valid.shape[1] // ranks
    learners = [make(share) for _ in range(ranks)]

    def run(rank: int) -> None:
        learner = learners[rank]
        plain_descent(learner)
        if ranks > 1:
            learner.join(sums(rank))
        for batch in batches:
            for _ in learner.learn(batch.columns(slice(rank * share, (rank + 1) * share)), 0.0):
                pass

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    return learners


def assert_the_same(found: FlatLearner, expected: FlatLearner) -> None:
    mine, others = found.flat.flat.double(), expected.flat.flat.double()
    assert (mine - others).norm() < 1e-5 * others.norm()
    assert torch.allclose(
        torch.from_numpy(found.statistics.to_array()), torch.from_numpy(expected.statistics.to_array()), rtol=1e-6
    )


MAKERS: dict[str, Any] = {"appo": appo_learner, "ppo": ppo_learner}
QUICK = [("appo", "mlp", 2), ("ppo", "mlp", 2), ("ppo", "gru", 2)]
SLOW = [("appo", "gru", 4), ("appo", "conv", 2), ("ppo", "mlp", 4), ("ppo", "conv", 2)]


@pytest.mark.parametrize(
    ("algo", "kind", "ranks"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_ranks_learn_as_one_learner(algo: str, kind: str, ranks: int) -> None:
    batches, make = [batch_of(kind, seed) for seed in range(STEPS)], partial(MAKERS[algo], kind)
    one = train(make, 1, batches)[0]
    learners = train(make, ranks, batches)
    first = train(make, ranks, batches[:1])[0]
    expected = train(make, 1, batches[:1])[0]
    gradient = expected.optimizer.gradient
    assert (first.optimizer.gradient - gradient).norm() < 1e-5 * gradient.norm()
    assert one.updates == STEPS
    for learner in learners:
        assert_the_same(learner, one)
        assert torch.equal(learner.flat.flat, learners[0].flat.flat)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["appo", "ppo"])
def test_sums_of_gloo_are_as_good(algo: str) -> None:
    batches, make, gloo = [batch_of("gru", seed) for seed in range(5)], partial(MAKERS[algo], "gru"), GlooRanks(4)
    gloo.form([0, 1, 2, 3])
    one, learners = train(make, 1, batches)[0], train(make, 4, batches, gloo.groups.__getitem__)
    for learner in learners:
        assert_the_same(learner, one)
        assert torch.equal(learner.flat.flat, learners[0].flat.flat)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_apex_learn_as_one_learner(ranks: int) -> None:
    batches = [apex.batch_of(seed=seed) for seed in range(STEPS)]
    batches[0].valid[0, 1] = False
    make = lambda columns: apex.learner_of(batch_size=12, max_grad_norm=1.0, normalize_input=True)  # noqa: E731
    one, learners = train(make, 1, batches)[0], train(make, ranks, batches)
    for learner in learners:
        assert_the_same(learner, one)


def test_rates_and_metrics_agree_and_the_gradient_is_clipped_after_the_sum() -> None:
    flags = {"lr_schedule": "kl_adaptive_minibatch", "lr_schedule_kl_threshold": 1e-3}
    batches, make = [batch_of("mlp", seed) for seed in range(3)], partial(appo_learner, "mlp", **flags)
    one, learners = train(make, 1, batches)[0], train(make, 4, batches)
    expected = one.metrics()
    for learner in learners:
        found = learner.metrics()
        alike = {name: found[name] for name in expected.keys() - {"ratio_max", "explained_variance"}}
        assert alike == pytest.approx({name: expected[name] for name in alike}, rel=1e-4, abs=1e-6)
    assert expected["grad_norm"] > 0.3


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    batch = batch_of("mlp", 0)
    batch.reward[2, COLUMNS - 1], batch.valid[2, COLUMNS - 1] = torch.inf, True
    one, learners = train(partial(appo_learner, "mlp"), 1, [batch])[0], train(partial(appo_learner, "mlp"), 2, [batch])
    for learner in (one, *learners):
        assert learner.metrics()["skipped"] == 1.0
        assert learner.updates == 1
        assert_the_same(learner, one)


def test_a_rank_without_a_valid_step_changes_nothing() -> None:
    batch = batch_of("gru", 0)
    batch.valid[:, COLUMNS // 2 :] = False
    half = batch.columns(slice(0, COLUMNS // 2))
    one = train(partial(appo_learner, "gru"), 1, [half])[0]
    for learner in train(partial(appo_learner, "gru"), 2, [batch]):
        assert_the_same(learner, one)


def test_running_advantages_and_the_end_of_an_iteration_are_of_all_ranks() -> None:
    flags = {"normalize_advantages": "running", "target_kl": 1e-9, "ppo_epochs": 3}
    spec, batch = SPECS["mlp"][1], batch_of("mlp", 0)
    make = lambda columns: ppo.learner_of(  # noqa: E731
        spec, batch_size=columns * appo.ROLLOUT, num_batches_per_iteration=1, **flags
    )
    one, learners = train(make, 1, [batch])[0], train(make, 2, [batch])
    for learner in learners:
        assert learner.updates == one.updates < 3
        assert torch.allclose(learner.further["advantages"], one.further["advantages"], rtol=1e-9)


class Breaking:
    """A group that breaks in a sum of this number, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def add_up(self, x: Tensor) -> None:
        if not self.left:
            raise GroupBroken("a rank is gone")
        self.left -= 1


@pytest.mark.parametrize("at", [2, 4], ids=["second step", "statistics"])
def test_a_survivor_of_a_broken_batch_goes_on_like_a_new_rank(at: int) -> None:
    """An epoch of two steps has the sums of both, two each, and a sum for the statistics."""
    flags = {"lr_schedule": "kl_adaptive_epoch", "lr_schedule_kl_threshold": 0.02, "num_batches_per_iteration": 2}
    survivor, newcomer = (appo_learner("gru", COLUMNS // 2, **flags) for _ in range(2))
    survivor.join(Breaking(at))
    with pytest.raises(GroupBroken):
        list(survivor.learn(batch_of("gru", 0), 0.0))
    newcomer.restore(survivor.state())
    for learner in (survivor, newcomer):
        learner.join(Threads(1).of(0))
        learner.drop_unfinished()
        list(learner.learn(batch_of("gru", 1), 0.0))
    assert float(survivor.optimizer.learning_rate) == float(newcomer.optimizer.learning_rate)
    assert torch.equal(survivor.flat.flat, newcomer.flat.flat)
    assert survivor.statistics.to_array().tolist() == newcomer.statistics.to_array().tolist()


def test_one_step_adds_up_one_vector_of_floats_and_the_moments() -> None:
    """APPO normalizes advantages of the weights in use: their moments come before the loss, everything else after."""
    threads, learner = Threads(1), appo_learner("gru", COLUMNS)
    learner.join(thread := threads.of(0))
    for _ in learner.learn(batch_of("gru", 0), 0.0):
        pass
    values = len(learner._metric_names) - 3
    vector = learner.flat.num_parameters + values + 1
    statistics = learner.statistics.to_array().size
    assert thread.sums == [(3, torch.float64), (vector, torch.float32), (statistics, torch.float64)]


def test_moments_of_ranks_are_moments_of_all_samples() -> None:
    generator, threads = torch.Generator().manual_seed(0), Threads(2)
    x = 1e4 + torch.randn(50, 3, generator=generator)
    own = [
        merge_batch(Moments.empty((3,)), part, torch.ones(len(part), dtype=torch.bool)) for part in x.split([20, 30])
    ]
    with ThreadPoolExecutor(2) as pool:
        centers = [torch.full((3,), 9990.0, dtype=torch.float64)]
        found = list(pool.map(lambda rank: pool_moments(threads.of(rank), [own[rank]], centers)[0], range(2)))
    for moments in found:
        assert moments.count == 50
        assert torch.allclose(moments.mean, x.double().mean(0), rtol=1e-12)
        assert torch.allclose(moments.m2 / 50, x.double().var(0, correction=0), rtol=1e-9)


def test_continuous_actions_and_microbatches_pool_too() -> None:
    spec = env_spec_of(*GAUSSIAN)
    batch = appo.batch_of(model_of(spec), spec, columns=COLUMNS)

    def make(columns: int, parts: int = 1, of: EnvSpec = spec) -> APPOLearner:
        return appo.learner_of(of, batch_size=columns * appo.ROLLOUT, microbatch_size=columns * appo.ROLLOUT // parts)

    one = train(make, 1, [batch])[0]
    for learner in train(partial(make, parts=2), 2, [batch]):
        assert_the_same(learner, one)


def sac_learner(columns: int, **flags: int) -> SACLearner:
    """Draw with noise of 1, which ranks cannot draw alike, for every share of a batch."""
    learner = sac.learner_of(learning_rate=1e-3, critic_learning_rate=1e-3, max_grad_norm=1.0, **flags)

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = logits[:, :3], logits[:, 3:]
        action = (mean + log_std.exp()).tanh()
        return action, -(log_std + (1 - action.square()).log()).sum(-1)

    learner.draw = draw  # type: ignore[method-assign]
    return learner


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_sac_learn_as_one_learner(ranks: int) -> None:
    batches = [sac.batch_of(seed=seed) for seed in range(STEPS)]
    for batch in batches:
        batch.recorded["weight"].fill_(1.0)  # ranks divide them by the mean of their shares
    one, learners = train(sac_learner, 1, batches)[0], train(sac_learner, ranks, batches)
    for learner in learners:
        assert_the_same(learner, one)
        for name, tensor, _ in one._named_tensors():
            found = next(own for other, own, _ in learner._named_tensors() if other == name)
            assert torch.allclose(found, tensor, rtol=1e-4, atol=1e-6), name


def test_ranks_with_moments_of_their_own_batches_stay_equal() -> None:
    batches = [sac.batch_of(seed=seed) for seed in range(STEPS)]
    first, second = train(partial(sac_learner, categorical_critics=5), 2, batches)
    for (name, one, _), (_, other, _) in zip(first._named_tensors(), second._named_tensors(), strict=True):
        assert torch.equal(one, other), name
    assert first.metrics()["skipped"] == 0.0


def test_a_rank_of_sac_without_a_batch_changes_nothing() -> None:
    whole = sac.batch_of()
    batch = whole.map(lambda x: torch.cat((x[:, : sac.SIZE // 2], torch.zeros_like(x[:, sac.SIZE // 2 :])), 1))
    one = train(sac_learner, 1, [whole.columns(slice(0, sac.SIZE // 2))])[0]
    for learner in train(sac_learner, 2, [batch]):
        assert_the_same(learner, one)
        assert learner.metrics()["skipped"] == 0.0
