"""Learners of small models, and batches as acting would have left them."""

import torch
from torch import Tensor

from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import EnvSpec
from tests.unit.models.cases import act_through, context_of, env_spec_of, model_of

ROLLOUT, COLUMNS = 8, 6
SPEC = env_spec_of()


def learning(**flags: object) -> APPOConfig:
    """One minibatch of all columns, BPTT segments of half a rollout, unless flags say otherwise."""
    values = {"rollout": ROLLOUT, "recurrence": 4, "batch_size": ROLLOUT * COLUMNS, "learning_rate": 1e-2, **flags}
    return APPOConfig(**values)  # type: ignore[arg-type]


def learner_of(
    spec: EnvSpec = SPEC, *, seed: int = 0, model: dict[str, object] | None = None, **flags: object
) -> APPOLearner:
    """Learners of one seed start from the same weights."""
    flat = FlatModule(model_of(spec, seed=seed, **(model or {})))
    return APPOLearner(flat, context_of(learning(**flags), spec))


def batch_of(
    model: ActorCritic, spec: EnvSpec = SPEC, *, columns: int = COLUMNS, noise: float = 0.3, seed: int = 0
) -> Batch:
    """Trajectories of a policy that differs from the model by `noise`, with dones and reset steps (NEXT_STEP).

    In a SAME_STEP spec the same dones are followed by no reset step and have final values.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    first = torch.rand(ROLLOUT + 1, columns, generator=generator) < 0.15
    done = torch.rand(ROLLOUT, columns, generator=generator) < 0.1
    done[:-1] = first[2:]
    valid = ~first[1:]
    if spec.same_step:
        done, valid = first[1:].clone(), torch.ones_like(valid)
    done &= valid
    truncated = done & (torch.rand(ROLLOUT, columns, generator=generator) < 0.5)
    acted = act_through(model, spec, ROLLOUT, columns, first)
    logits = acted.logits + noise * torch.randn(acted.logits.shape, generator=generator)
    policy = ActionDistribution(spec.action.parts, logits)
    action = policy.sample(generator)
    value = model.denormalize_value(acted.value[:-1])

    def random(*leading: int) -> Tensor:
        return torch.randn(*leading, columns, generator=generator)

    return Batch(
        obs=acted.obs,
        first=first,
        valid=valid,
        reward=random(ROLLOUT).masked_fill(~valid, 0.0),
        terminated=done & ~truncated,
        truncated=truncated,
        num_frames=torch.ones(ROLLOUT, columns, dtype=torch.int32),
        action=action,
        recorded={
            "final_value": random(ROLLOUT if spec.same_step else 0),
            "logits": logits,
            "log_prob": policy.log_prob(action),
            "value": value + noise * random(ROLLOUT),
        },
        policy_version=torch.ones(ROLLOUT, columns, dtype=torch.int64),
        rnn_state=acted.rnn_state[:ROLLOUT:4].clone(),
    )


def clone(batch: Batch) -> Batch:
    return batch.copy()


def same(a: Batch, b: Batch) -> bool:
    assert list(a.named()) == list(b.named())
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


def learn(learner: APPOLearner, batch: Batch, progress: float = 0.0) -> int:
    """Train on a batch; how many steps were taken."""
    return sum(1 for _ in learner.learn(batch, progress))


def parameters(learner: APPOLearner) -> Tensor:
    """A copy of what is trained (without the buffers of running statistics)."""
    return learner.flat.flat[: learner.flat.num_parameters].clone()
