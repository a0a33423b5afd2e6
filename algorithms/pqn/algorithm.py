"""PQN, Q-learning without a replay, as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.parts.algorithm import FlatAlgorithm
from appo.algorithms.parts.choices import epsilon_of_rows, require_choices
from appo.algorithms.pqn.config import METRICS, PANEL, PQNConfig
from appo.algorithms.pqn.presets import NORMALIZED, PRESETS
from appo.algorithms.runtime.algorithm import Context, Presets
from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy
    from appo.algorithms.pqn.learner import PQNLearner
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class PQN(FlatAlgorithm):
    """Epsilon-greedy Q-network, trained on the lambda-returns of steps of the newest weights."""

    name: ClassVar[str] = "PQN"
    flags: ClassVar[type[PQNConfig]] = PQNConfig
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = PANEL
    presets: ClassVar[Presets] = Presets(PRESETS, NORMALIZED, NORMALIZED)
    synchronous: ClassVar[bool] = True
    values: ClassVar[str] = "actions"

    def check(self, flags: PQNConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and environments whose actions are not choices (UsageError)."""
        flags.check()
        require_choices(self.name, spec)

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the value of the true final observation, in units of return; the learner computes all others."""
        from appo.algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

        return {"final_value": Recorded(("F", "R"))}

    def make_model(self, context: Context) -> FlatModule:
        """Make a Q-network on the device, with weights drawn from torch's global generator.

        Raises:
            UsageError: reproduction shall be verified, for which acting records nothing.
        """
        from appo.algorithms.models.flat_module import FlatModule
        from appo.algorithms.models.q_network import build_q_network

        if context.verify:
            raise UsageError("--verify_reproduction compares probabilities of actions, which --algo=PQN has not")
        return FlatModule(build_q_network(context.model, context.spec, dueling=False, explores=True).to(context.device))

    def make_policy(self, context: Context, flat: FlatModule) -> EpsilonGreedyPolicy:
        """Make the policy; without shared memory of a run the policy does not explore."""
        from appo.algorithms.models.build import let_act
        from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy

        let_act(flat, context.model, context.precision, context.device)
        return EpsilonGreedyPolicy(
            flat, context.spec, epsilon_of_rows(context), rescaled=False, records=("final_value",)
        )

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns; with a single policy, slots are released after training."""
        from appo.algorithms.parts.columns import make_column_batches

        lag = None if context.num_policies == 1 else 2  # as of PPO: learners that wait would wait for each other
        return make_column_batches(context, trajectories, sampling, device, hold=True, max_policy_lag=lag)

    def learner_class(self) -> type[PQNLearner]:
        """Return the class of the learner; the learner refuses flags that contradict the network (UsageError)."""
        from appo.algorithms.pqn.learner import PQNLearner

        return PQNLearner
