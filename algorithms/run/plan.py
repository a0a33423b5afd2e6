"""The plan of a run, known before workers exist. Free of torch, for main and actors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from appo.algorithms.datasets.config import LOGITS
from appo.algorithms.run.config import Config
from appo.algorithms.runtime.algorithm import Algorithm, Context
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.heartbeat import Heartbeat
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateBlock
from appo.algorithms.runtime.memory.slots import FinalObservations, Recorded, Trajectories, sizes_of
from appo.algorithms.runtime.memory.units import Units
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import PolicyTraits
from appo.algorithms.runtime.processes import crash_recorder
from appo.algorithms.runtime.processes.channels import Mailboxes
from appo.algorithms.runtime.ranks import Rank
from appo.algorithms.runtime.roles import BRIDGE, LEARNER, POLICY_WORKER, Role
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec

# Every random generator of a run derives from --seed through one of these branches, or the branch of
# population/exploit_explore.py.
SEED_BRANCHES = {
    "model": 0,
    LEARNER.name: 1,
    POLICY_WORKER.name: 2,
    "group": 3,
    "start": 4,
    "leg": 5,
    "actions": 6,
    "further": 7,
    BRIDGE.name: 8,
}


def seed_of(seeds: np.random.SeedSequence) -> int:
    """Return one seed of 63 bits."""
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Probe:
    """Description of environment and models, measured before memory is reserved."""

    spec: EnvSpec
    models: tuple[ModelDescription, ...]
    config: Config


@dataclass(frozen=True)
class RunPlan:
    """The facts of a run that are known before its workers exist; every process receives the plan at its start.

    Attributes:
        config: all flags; each worker receives its part.
        spec: spaces of the environment.
        models: sizes of weights and state of each policy.
        topology: number and place of all workers.
        budget: limits of training.
        device: device of the networks, "cpu" or "cuda".
        seed: seed of the run, of a resumed start, or of a segment (see `ResumeSegments`).
        pause_env_steps: end of the present segment; None: the run is not divided.
        traits: initial or resumed traits of each policy; (): policies do not differ.
        directory: directory of the run, absolute; None: a trial, which opens no file of a run.
        rank: place of the run among several learners; None: a single learner.
        starts: number of starts of a rank other than 0, whose environments must not repeat episodes.
    """

    config: Config
    spec: EnvSpec
    models: tuple[ModelDescription, ...]
    topology: Topology
    budget: Budget
    device: str
    seed: int
    pause_env_steps: int | None = None
    traits: tuple[PolicyTraits, ...] = ()
    directory: Path | None = None
    rank: Rank | None = None
    starts: int = 0

    @property
    def algorithm(self) -> Algorithm:
        """Return the algorithm, which makes all parts that learn."""
        return self.config.algorithm

    @property
    def in_segments(self) -> bool:
        """Return whether the run is divided into segments, see `ResumeSegments`."""
        return self.pause_env_steps is not None

    @property
    def buffered(self) -> bool:
        """Return whether networks read from buffers at fixed places, as GPUs require."""
        return self.device != "cpu"

    def device_of(self, role: Role) -> str:
        """Return the device of a worker's network."""
        return "cpu" if self.topology.placement in role.cpu_placements else self.device

    def model_of(self, policy: int) -> ModelDescription:
        """Return the description of a policy's network; past versions have the network of policy 0."""
        return self.models[policy if policy < self.topology.num_policies else 0]

    def traits_of(self, policy: int) -> PolicyTraits:
        """Return the traits that distinguish a policy at the start."""
        return self.traits[policy] if self.traits else PolicyTraits()

    def seeds(self, branch: str, *index: int) -> np.random.SeedSequence:
        """Return the random seeds of a worker; a restarted worker, of a later generation, has new seeds.

        The seeds of a further rank are its own, except for the seed of the first weights.
        """
        is_further = self.rank is not None and self.rank.number > 0 and branch != "model"
        entropy = [self.seed, self.rank.number, self.starts] if is_further and self.rank else self.seed
        return np.random.SeedSequence(entropy, spawn_key=(SEED_BRANCHES[branch], *index))

    def context(
        self, policy: int, device: str, seeds: np.random.SeedSequence | None = None, arena: Arena | None = None
    ) -> Context:
        """Return the context of a policy for the algorithm; past versions have the common flags."""
        c, t = self.config, self.topology
        traits = self.traits_of(policy).hyperparameters if policy < t.num_policies else {}
        return Context(
            self.spec,
            replace(c.learning, **traits),
            c.model_of(policy),
            c.run.precision,
            device,
            policy,
            t.num_acting,
            seeds,
            self.buffered,
            c.logging.verify_reproduction,
            arena,
            self.model_of(policy).rnn_state_size,
            self.directory,
            c.env.reward_scale,
            c.env.reward_clip,
            t.acting_rows,
            c.sampling.max_policy_lag,
        )

    @property
    def recorded(self) -> Mapping[str, Recorded]:
        """Return the slot fields that acting fills: the algorithm's, and logits for a dataset that wants logits."""
        own = self.algorithm.recorded(self.spec)
        if not self.topology.writes or "log_prob" not in own or LOGITS not in self.config.output.output_columns:
            return own
        return {LOGITS: Recorded(("T", "R", self.spec.action.num_logits)), **own}

    def trajectories(self, arena: Arena, policy: int | None = None) -> Trajectories:
        """Return the slots in shared memory, with recurrent states as wide as a policy's.

        Args:
            arena: shared memory.
            policy: number of the policy that reads and writes the slots; None: the widest states.
        """
        found = Trajectories.attach(arena, self.spec, self.recorded)
        if policy is None or self.model_of(policy).rnn_state_size == found.rnn_state.shape[-1]:
            return found
        return replace(found, rnn_state=found.rnn_state[..., : self.model_of(policy).rnn_state_size])

    def fields(self) -> list[Field]:
        """Return the fields of the run's shared memory (ValueError: two policies declare a field in different ways)."""
        c, t = self.config, self.topology
        sizes = sizes_of(t, self.spec, max(model.rnn_state_size for model in self.models), c.learning.segment_steps)
        fields = [
            *Trajectories.declare(sizes, self.spec, self.recorded),
            *FinalObservations.declare(sizes, self.spec),
            *Mailboxes.declare(t),
            Heartbeat.declare(len(t.processes())),
            *crash_recorder.declare(t, self.spec),
            *([Units.declare(t)] if t.apart else []),
        ]
        for policy in range(t.num_acting):
            fields += WeightRing.declare(policy, self.model_of(policy).num_weights)
        own: dict[str, Field] = {}  # of the algorithm; equal fields of several policies are shared
        for policy in range(t.num_policies):
            model = self.model_of(policy)
            fields += StateBlock.declare(policy, model.layout.vectors)
            if t.is_remote:  # memory of what learns is on the head
                continue
            for field in self.algorithm.fields(self.context(policy, self.device), t, model.num_weights):
                if own.setdefault(field.name, field) != field:
                    raise ValueError(f"policies declare the field {field.name} in different ways")
        if t.writes:
            from appo.algorithms.datasets.output import output_fields  # late: only who writes needs spaces of gymnasium

            fields += output_fields(c.output, sizes, self.spec, self.recorded)
        return [*fields, *own.values()]
