"""Soft actor-critic on the replay, with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1).

Critics minimize (Q(s, a) - y)^2 with y = R + gamma^n (min Q'(s', a') - alpha log pi(a'|s')), the policy minimizes
alpha log pi(a|s) - min Q(s, a).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import model_inputs
from appo.algorithms.models.critics import Critics
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import PolicyNetwork, build_policy_network
from appo.algorithms.ops.distributions import ActionDistribution, squashed
from appo.algorithms.parts.algorithm import require_squashed
from appo.algorithms.parts.config import STEP_METRICS, network_metrics
from appo.algorithms.parts.learner import FlatLearner
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.replay.algorithm import ReplayAlgorithm
from appo.algorithms.replay.config import PacedReplayConfig
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch, Feedback
from appo.envs.spec import EnvSpec
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class SACConfig(PacedReplayConfig):
    """Learning."""

    learning_rate: float = same_flag(PacedReplayConfig, "learning_rate", default=1e-3)
    critic_learning_rate: float = flag(1e-3, "step size of the critics", minimum=0)
    rollout: int = same_flag(PacedReplayConfig, "rollout", default=1)
    batch_size: int = same_flag(PacedReplayConfig, "batch_size", default=256)
    learning_starts: int = same_flag(PacedReplayConfig, "learning_starts", default=1000)
    prioritized_replay: bool = same_flag(PacedReplayConfig, "prioritized_replay", default=False)
    max_weight_sync_delay: int = same_flag(PacedReplayConfig, "max_weight_sync_delay", default=0)


class SACLearner(FlatLearner):
    """Makes one step of critics, policy and temperature per batch."""

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        assert isinstance(flat.module, PolicyNetwork)
        self.model, self.action, device = flat.module, context.spec.action, flat.flat.device
        critics = Critics(model_inputs(context.spec), context.model, self.action.num_values, 2).to(device)
        self.target = self.keep_network("target", copy.deepcopy(critics))
        self.critics = self.add_network("critics", critics, rate="critic_learning_rate")
        self.alpha = self.add_network("log_alpha", nn.ParameterList([torch.zeros(1, device=device)]))

    def draw(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Draw actions [B, A] in [-1, 1], and their log-probability [B], with gradients."""
        memory = self.flat.flat.new_zeros(len(next(iter(obs.values()))), 0)
        logits, _, _ = self.model.act_scaled(obs, torch.ones(len(memory), device=memory.device).bool(), memory)
        action, log_prob = ActionDistribution(self.action.parts, logits).rsample(self.device_generator)
        return squashed(self.action.parts, action), log_prob

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback]:
        """Train on steps [1, B]; row 0 of the observations belongs to the steps, row 1 follows n rewards later."""
        self.follow(progress)
        now, later = (self.model.scaled({key: batch.obs[key][i] for key in self.model.keys}) for i in (0, 1))
        alpha, discount, critics = self.alpha.flat.flat.exp(), batch.recorded["discount"][0], self.critics.flat.module
        with torch.no_grad():
            action, log_prob = self.draw(later)
            value = self.target.module(later, action).amin(0) - alpha * log_prob
            y = batch.reward[0] + torch.where(discount > 0, discount * value, 0.0)
        q = critics(now, squashed(self.action.parts, batch.action[0]))
        self.critics.descend((q - y).square().mul(batch.recorded["weight"][0]).mean(1).sum(), batch.valid)
        action, log_prob = self.draw(now)
        self.optimizer.gradient.zero_()
        loss = (alpha * log_prob - critics(now, action, frozen=True).amin(0)).mean()
        loss.backward()
        self.step(batch.valid, {"loss": loss, "q_mean": q.mean(), "entropy": -log_prob.mean()})
        excess = log_prob.detach().mean() - self.action.num_values  # the target entropy is -A nats
        self.alpha.descend(-(next(self.alpha.flat.module.parameters()) * excess).sum(), batch.valid)
        self.target.flat.lerp_(self.critics.flat.flat, 0.005)
        self.statistics.update(batch, [])
        self.count_update()
        self.version += 1
        yield {"priority": (q.detach() - y).abs().mean(0, keepdim=True).cpu().numpy(), "flags": self.config}


class SAC(ReplayAlgorithm):
    """SAC; acting, replay and batches are inherited."""

    name, flags, values = "OwnSAC", SACConfig, ""
    metrics = STEP_METRICS | network_metrics("critics") | network_metrics("log_alpha") | {
        "loss": "alpha log pi - Q", "q_mean": "mean value of the actions taken", "entropy": "mean of -log pi"
    }  # fmt: skip

    def check(self, flags: SACConfig, spec: EnvSpec | None) -> None:
        """Refuse actions that are not squashed."""
        super().check(flags, spec)
        if spec is not None:
            require_squashed(self.name, spec.action)

    def preset(self, name: str, device: str) -> dict[str, object]:
        """Return flags for known environments."""
        return {"action_distribution": "tanh_gaussian", "use_rnn": False, "encoder_mlp_layers": (64, 64)}

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> dict[str, object]:
        """Return flags for unknown environments."""
        return {"action_distribution": "tanh_gaussian", "initial_stddev": 1.0, "use_rnn": False}

    def learner_class(self) -> type[FlatLearner]:
        """Return the class of the learner."""
        return SACLearner

    def network(self, context: Context) -> PolicyNetwork:
        """Make the network of the policy."""
        return build_policy_network(context.model, context.spec)

    def policy(self, context: Context, flat: FlatModule) -> StochasticPolicy:
        """Make the policy, which records nothing."""
        return StochasticPolicy(flat, context.spec, ())
