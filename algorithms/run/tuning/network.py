"""The size of the model, needed before memory is reserved, and the costs of acting and training."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from appo.algorithms.models.build import computes_in_bf16
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.custom import refuse_hidden_inputs, refuse_two_behaviours
from appo.algorithms.models.encoders import share_images
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.population.config import PopulationConfig
from appo.algorithms.run.config import Config
from appo.algorithms.run.defaults import completed, learned_spec
from appo.algorithms.run.plan import Probe, RunPlan
from appo.algorithms.run.tuning.choice import NOTHING, Curve, rising, usual_ratio
from appo.algorithms.run.tuning.environment import LARGEST_BYTES, observation_bytes
from appo.algorithms.run.workers.networks import make_learner, make_policy_worker
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import ModelDescription
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import ActionRequest, Address, TrajectoryReady
from appo.algorithms.runtime.roles import LEARNER, POLICY_WORKER
from appo.algorithms.runtime.topology import Topology
from appo.envs.make import make_first, with_company, with_precision
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.system import machine

ACTING_ROWS = (1, 4, 16, 64, 256)
ACTING_STEPS = 3  # observations in a slot of a rollout of 2
ACTING_SECONDS = 0.02  # per number of rows
SLOWEST_ACTING_SECONDS = 0.005  # of a forward pass; more rows are not tried
SLOWEST_ROW_SECONDS = 0.02  # the same of a single row, which says nothing of others
SLOWEST_SECONDS = 0.5  # of calls; no more of them are made for the sake of a shortest one
LARGEST_SECONDS = 0.2  # of the largest minibatch that is tried, unless that is two trajectories
TRAINING_SECONDS = 0.3  # of all that are timed
NEVER = 1 << 60


def probe(config: Config) -> Probe:
    """Make the environment and the model once, in this process.

    Raises:
        UsageError: environment or model contradict the flags.
        EnvironmentFailure: the environment raised.
    """
    config.run.keep_code_out()
    played = None
    if config.env.env:
        envs = make_first(config.env.as_trained, config.sampling.given_group_size)
        played = with_precision(envs)
        if config.sampling.shares_process:
            played = with_company(config.env.as_trained, played)
        envs.close()
    spec = learned_spec(config, played)
    whole = completed(config, spec)
    same = whole.env == config.env
    return Probe(spec, NetworkTimer(whole, spec).descriptions, whole) if same else probe(whole)


class NetworkTimer:
    """The model at work, as in a policy worker and a learner.

    Attributes:
        descriptions: memory of each policy's model, and initial state of its learner.
        columns: columns of the largest minibatch that was timed.

    Raises:
        UsageError: the model contradicts the flags.
    """

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        for values in config.per_policy:
            config.algorithm.check(replace(config.learning, **values), spec)
        self.config, self.spec = config, spec
        flags = [replace(config.learning, **values) for values in config.per_policy]
        contexts = [
            Context(spec, own, config.model_of(policy), config.run.precision, "cpu", policy, len(flags))
            for policy, own in enumerate(flags)
        ]
        self.flat = self._make(contexts[0])
        self.descriptions = tuple(self._describe(context, contexts[0].model) for context in contexts)
        self.columns = 1

    def _make(self, context: Context) -> FlatModule:
        """Make a model; refuse a custom model that acts differently elsewhere, or from the way it learns."""
        flat = self.config.algorithm.make_model(context)
        if context.model.encoder_custom:
            refuse_two_behaviours(flat.module, context.model, context.spec)
            make = partial(self.config.algorithm.make_model, context)
            refuse_hidden_inputs(flat, make, context.model, context.spec)
        return flat

    def _describe(self, context: Context, first: ModelConfig) -> ModelDescription:
        """Describe the memory of a policy's model; the first model serves for equal flags."""
        algorithm = self.config.algorithm
        flat = self.flat if context.model == first else self._make(context)
        return ModelDescription(flat.table, cast(int, flat.module.rnn_state_size), algorithm.layout(context, flat))

    def costs(self) -> tuple[Curve, Curve]:
        """Return seconds of forward passes by rows, and of training on a sample in all epochs by threads."""
        acting = self.acting() if self.config.algorithm.needs_actors else NOTHING
        threads = self.config.sampling.learner_main_loop_num_cores or 1
        machine.limit_threads(threads)
        return acting, ((threads, self.training_seconds()),)

    def acting(self) -> Curve:
        """Return seconds of forward passes by rows, up to the rows that a policy worker answers quickly."""
        row_bytes = ACTING_STEPS * observation_bytes(self.spec)
        acting: list[tuple[int, float]] = []
        for rows in ACTING_ROWS:
            slowest = SLOWEST_ACTING_SECONDS if len(acting) > 1 else SLOWEST_ROW_SECONDS
            if acting and (acting[-1][1] > slowest or rows * row_bytes > LARGEST_BYTES):
                break
            acting.append((rows, self.acting_seconds(rows)))
        return rising(acting)

    def threads_ratio(self, threads: int) -> float:
        """Return the ratio of training seconds with that many threads, without other work, to seconds with one.

        Both take turns, and the shortest times count, see `_seconds`. Images divide well; a bad ratio of images means
        that another program took a core for the moment. For images the result is therefore the geometric mean of the
        measured and the usual ratio.
        """
        train = self.update(self.columns)
        shared = share_images(self.flat.module)

        def seconds(count: int) -> float:
            machine.limit_threads(count)  # which encoders of the learner's further networks follow, too
            share_images(self.flat.module)  # torch's operations on one thread again
            return _time_call(train)

        seconds(threads)  # starts them, and makes new plans of convolutions
        together, alone = seconds(threads), seconds(1)
        end = time.perf_counter() + TRAINING_SECONDS
        while time.perf_counter() < end:
            together, alone = min(together, seconds(threads)), min(alone, seconds(1))
        ratio = together / alone
        return math.sqrt(ratio * usual_ratio(threads)) if shared else ratio

    def acting_seconds(self, rows: int) -> float:
        """Return the seconds of a policy worker's answer for that many rows."""
        learning = replace(self.config.learning, rollout=ACTING_STEPS - 1)
        if hasattr(learning, "recurrence"):  # not every algorithm divides a rollout
            learning = replace(learning, recurrence=ACTING_STEPS - 1)
        blueprint, arena, _ = self._world(replace(self.config, learning=learning), rows)
        # In bf16 it computes with copies of the weights, which a learner cannot train.
        flat = (
            None
            if computes_in_bf16(self.config.model, self.config.run.precision, self.flat.module, "cpu")
            else self.flat
        )
        worker = make_policy_worker(blueprint, arena, Address(POLICY_WORKER.name, 0, 0), flat=flat)

        def answer() -> None:
            for _ in worker.handle(ActionRequest(0, 0, 0, 1, 0)):
                pass
            for _ in worker.work():
                pass

        return _seconds(answer, ACTING_SECONDS)

    def training_seconds(self) -> float:
        """Return the seconds of a learner worker's training on a sample in all epochs.

        The seconds of a minibatch have a constant part and a part per trajectory. A large network leaves no time for
        many trajectories: one trajectory, and as many as there is time for, give the estimate for the real minibatch.
        """
        learning = self.config.learning
        size = max(1, min(learning.batch_size // learning.rollout, learning.macro_batch_columns))
        one = many = each = self.update_seconds(1, TRAINING_SECONDS / 10)
        allowed = int(LARGEST_SECONDS / max(one, 1e-6))
        self.columns = min(max(2, allowed), size) if allowed else 1  # what one takes may be the step's, not its own
        if self.columns > 1:
            many = self.update_seconds(self.columns, TRAINING_SECONDS)
            each = max((many - one) / (self.columns - 1), many / self.columns / 4)  # `one` may have been disturbed
        return float((many + each * (size - self.columns)) / size / learning.rollout * learning.ppo_epochs)

    def update_seconds(self, columns: int, budget_seconds: float) -> float:
        """Return the seconds from a slot of that many trajectories to trained weights."""
        return _seconds(self.update(columns), budget_seconds)

    def update(self, columns: int) -> Callable[[], None]:
        """Return a function that trains from a slot of that many trajectories to new weights, like a learner."""
        learning = self.config.learning
        one_step = learning.one_update(columns * learning.rollout)
        sampling = replace(self.config.sampling, max_policy_lag=NEVER)
        alone, quiet = PopulationConfig(), LoggingConfig()
        config = replace(self.config, learning=one_step, sampling=sampling, population=alone, logging=quiet)
        blueprint, arena, trajectories = self._world(config, columns)
        worker = cast(LearnerWorker, make_learner(blueprint, arena, Address(LEARNER.name, 0), flat=self.flat))

        def train() -> None:
            trajectories.sequence[0] += 1  # a hand-over is taken once
            for _ in worker.handle(TrajectoryReady(0, 0, int(trajectories.sequence[0]), 0)):
                pass
            batches = worker.totals["batches"]
            while worker.pending() and worker.totals["batches"] == batches:  # a source that reads never has nothing
                for _ in worker.work():
                    pass

        return train

    def _world(self, config: Config, rows: int) -> tuple[RunPlan, Arena, Trajectories]:
        """Make the memory of a run with a single slot; every step is valid, and every choice is allowed."""
        topology = Topology("serial", 1, 1, 1, 1, 1, rows, config.learning.rollout)
        budget = Budget(NEVER, NEVER, 0.0, None, None)
        spec = replace(self.spec, num_agents=1)  # any number of rows, which need not be whole environments
        blueprint = RunPlan(config, spec, self.descriptions[:1], topology, budget, "cpu", 0)
        arena = Arena.create(blueprint.fields())
        trajectories = blueprint.trajectories(arena)
        trajectories.valid[:] = True
        if self.spec.action_mask:
            trajectories.obs[MASK_KEY][:] = 1
        return blueprint, arena, trajectories


def _seconds(function: Callable[[], None], budget_seconds: float) -> float:
    """Return the shortest time of some calls after a warm-up, or the time of a very slow warm-up.

    The first call of a network allocates memory and plans convolutions, and takes up to ten times as long. Other
    programs make calls longer, never shorter.
    """
    first, seconds = _time_call(function), list[float]()
    spent = first
    while spent < (SLOWEST_SECONDS if len(seconds) < 2 else budget_seconds):
        seconds.append(_time_call(function))
        spent += seconds[-1]
    return min(seconds, default=first)


def _time_call(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
