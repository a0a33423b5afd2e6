"""Synchronous PPO in one process, on the two protocols between runtime and algorithm: `BatchSource` and `Learner`.

    python -m examples.synchronous_ppo                  # GridWalk of examples/custom_env.py
    python -m examples.synchronous_ppo CartPole-v1 200000

`Rollouts` plays only when a batch is asked for, so every batch is the newest policy's; `PPO` trains on it. What drives
them, counts, publishes the weights and keeps the state is the `LearnerWorker` of asynchronous runs, unchanged.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from algorithms.appo.algorithm import APPO
from algorithms.appo.config import LearningConfig
from algorithms.models.actor_critic import ActorCritic
from algorithms.models.build import build_model
from algorithms.models.config import ModelConfig
from algorithms.models.flat_module import FlatModule, split
from algorithms.ops import losses
from algorithms.ops.distributions import ActionDistribution
from algorithms.ops.returns import Returns, gae
from algorithms.parts.optimizer import FlatAdam, adam_layout
from algorithms.parts.stochastic_policy import StochasticPolicy
from algorithms.runtime.budget import Budget
from algorithms.runtime.learning.batches import Batch, ColumnBatches
from algorithms.runtime.learning.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from algorithms.runtime.memory.arena import Arena, Array
from algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateBlock, StateLayout, empty_vectors
from algorithms.runtime.memory.slots import FinalObservations, Trajectories, sizes_of
from algorithms.runtime.memory.weights import WeightRing
from algorithms.runtime.messages import (
    ActionRequest,
    Address,
    EpisodesDone,
    LearnerReport,
    Message,
    SlotReleased,
    TrajectoryReady,
)
from algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan
from algorithms.runtime.sampling.policy_worker import ActingPlan, HostEngine, PolicyWorker
from algorithms.runtime.topology import Topology
from envs.config import EnvConfig
from envs.make import make_group
from envs.spec import EnvSpec

NUM_ENVS, ROLLOUT = 32, 32
MODEL = ModelConfig(encoder_mlp_layers=(64, 64), use_rnn=False, normalize_input=False)
LEARNING = LearningConfig(
    rollout=ROLLOUT, batch_size=256, ppo_epochs=4, learning_rate=1e-3, ppo_clip_ratio=0.2, max_grad_norm=0.5
)


class Rollouts(ColumnBatches):
    """A `BatchSource` that plays one trajectory of all its environments whenever a batch is asked for.

    A column that is even one version old would be discarded, so that `discarded` proves that there is none.
    """

    def __init__(self, group: EnvGroup, acting: PolicyWorker) -> None:
        super().__init__(group.trajectories, 0, group.envs.num_rows, max_policy_lag=1, hold=False, num_policies=1)
        self.group, self.acting = group, acting
        self.returns: deque[float] = deque(maxlen=100)
        group.reset()
        self._note(group.begin())

    @property
    def waiting(self) -> int:
        """There is always a trajectory to play."""
        return 1

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Play until the trajectory is handed over; its slot goes back to the group and to nobody else."""
        while not self.queue:
            for _ in self.acting.answer([self.request]):
                self._note(self.group.advance())
        for released in super().fill(version):
            self._note(self.group.release(released))
        yield from ()

    def mean_return(self) -> float:
        """The mean of the last 100 episodes; 0 before the first."""
        self._note(self.group.episodes.flush(now=True))
        return fmean(self.returns or [0.0])

    def _note(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case ActionRequest():  # the next trajectory's first one waits here while the learner trains
                    self.request = message
                case TrajectoryReady():
                    self.add(message)
                case EpisodesDone():
                    self.returns.extend(message.episode_return.tolist())


class PPO:
    """A `Learner`: proximal policy optimization with advantages estimated once per batch (arXiv:1707.06347)."""

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: LearningConfig) -> None:
        assert isinstance(flat.module, ActorCritic)
        assert not spec.action_mask, "this example leaves action masks out"
        self.flat, self.model, self.config, self.parts = flat, flat.module, config, spec.action.parts
        self.version, self.updates, self.last_loss = 1, 0, 0.0
        self.adam = FlatAdam(flat.flat[: flat.num_parameters], config)
        views = split(self.adam.gradient, flat.parameter_table)
        for parameter, view in zip(self.model.parameters(), views, strict=True):
            parameter.grad = view

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Yield after every optimizer step, when the worker publishes the weights."""
        with torch.no_grad():
            _, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        signals = {name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "valid", "first")}
        final_value = batch.recorded["final_value"]
        signals["final_value"] = final_value if len(final_value) else None
        returns = gae(value=value, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda, **signals)
        for _ in range(self.config.ppo_epochs):
            for columns in torch.split(torch.randperm(value.shape[1]), self.config.batch_size // self.config.rollout):
                self.update(batch.columns(columns), Returns(*(x[:, columns] for x in returns)))
                self.version += 1
                self.updates += 1
                yield

    def update(self, batch: Batch, returns: Returns) -> None:
        """Make one optimizer step on a minibatch [T, B]."""
        logits, value = self.model.unroll(batch.obs, batch.first, batch.rnn_state, self.config.segment_steps)
        policy, valid = ActionDistribution(self.parts, logits), batch.valid
        ratio = losses.clamped_ratio(policy.log_prob(batch.action), batch.recorded["log_prob"])
        advantage = losses.normalize_advantage(returns.advantage, valid)
        surrogate = losses.ppo_policy_loss(ratio, advantage, self.config.ppo_clip_ratio)
        value_error = 0.5 * (value[:-1] - returns.target).square()
        entropy = self.config.exploration_loss_coeff * policy.entropy()
        loss = losses.masked_mean(surrogate + self.config.value_loss_coeff * value_error - entropy, valid)
        self.adam.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step(valid.any(), torch.zeros(()))
        self.last_loss = loss.item()

    def configure(self, config: LearningConfig) -> None:
        """Follow other flags of the optimizer."""
        self.adam.configure(config)

    @property
    def layout(self) -> StateLayout:
        """What `state` holds."""
        return adam_layout(len(self.flat.flat), LEARNING, {})

    def metrics(self) -> dict[str, float]:
        """The loss of the last step."""
        return {"loss": self.last_loss}

    def state(self, into: dict[str, Array] | None = None) -> LearnerState:
        """Weights, Adam's moments and counters; there are no running statistics."""
        vectors = empty_vectors(self.layout.vectors) if into is None else into
        vectors[WEIGHTS][:] = self.flat.flat.numpy()
        self.adam.save(vectors)
        meta = {"version": self.version, "updates": self.updates, **self.adam.meta()}
        return LearnerState(vectors, meta)

    def restore(self, state: LearnerState) -> None:
        """Continue from a state."""
        self.flat.flat.copy_(torch.from_numpy(state.weights))
        self.adam.restore(state.vectors, state.meta)
        self.version, self.updates = state.meta["version"], state.meta["updates"]


def make_worker(env: str, env_steps: int, seed: int) -> tuple[LearnerWorker, Rollouts]:
    """A learner worker and the rollouts it trains on, in memory of their own."""
    torch.manual_seed(seed)
    envs = make_group(EnvConfig(env=env), NUM_ENVS)
    spec, segment = envs.spec, LEARNING.segment_steps
    learner = PPO(FlatModule(build_model(MODEL, spec)), spec, LEARNING)
    acting = FlatModule(build_model(MODEL, spec).eval())  # takes its weights from the ring
    topology = Topology(
        placement="serial",
        num_actors=1,
        groups_per_actor=1,
        slots_per_group=2,  # one waits for its first actions while the other is copied
        num_policies=1,
        policy_workers_per_policy=1,
        rows=envs.num_rows,
        rollout=ROLLOUT,
    )
    sizes, size = sizes_of(topology, spec, learner.model.rnn_state_size, segment), len(learner.flat.flat)
    recorded = APPO().recorded(spec)  # it acts as APPO does
    fields = Trajectories.declare(sizes, spec, recorded) + FinalObservations.declare(sizes, spec)
    arena = Arena.create([*fields, *WeightRing.declare(0, size), *StateBlock.declare(0, learner.layout.vectors)])
    trajectories, finals = Trajectories.attach(arena, spec, recorded), FinalObservations.attach(arena, spec)
    seeds, memory = np.random.SeedSequence(seed), LearnerMemory.attach(arena, trajectories, policy=0)
    group = EnvGroup(GroupPlan(index=0, slots=range(2), start=0), envs, trajectories, finals, seeds)
    acts = ActingPlan(spec, num_groups=1, recurrence=segment, num_policies=1, device="cpu", seed=seed)
    engine = HostEngine(StochasticPolicy(acting, spec), acts, trajectories)
    rollouts = Rollouts(group, PolicyWorker(Address("policy_worker"), acts, engine, memory.ring, trajectories, finals))
    trains = TrainingPlan(Budget(env_steps), 1, "cpu", LEARNING.max_skipped_updates, Path("incidents"))
    return LearnerWorker(Address("learner"), trains, learner, rollouts, memory), rollouts


def train(env: str, env_steps: int, seed: int = 1) -> tuple[float, LearnerReport]:
    """Train for that many env steps; the mean return of the last 100 episodes, and the worker's last report."""
    worker, rollouts = make_worker(env, env_steps, seed)
    while worker.pending():
        for message in worker.work():
            if isinstance(message, LearnerReport):
                report = message
                print(f"{report.totals['env_steps']:8} env steps, mean return {rollouts.mean_return():.3f}")
    rollouts.group.envs.close()
    return rollouts.mean_return(), report


if __name__ == "__main__":
    named = dict(zip(("env", "env_steps"), sys.argv[1:], strict=False))
    train(named.get("env", "examples.custom_env:GridWalk"), int(named.get("env_steps", 50_000)))
