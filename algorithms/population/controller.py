"""Population-based training in main: decides when a policy is due, writes the decision down, and sends the order."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from appo.algorithms.population.exploit_explore import ExploitExplore, PolicyDecision, rank_policies
from appo.algorithms.population.lineage import Event, Lineage, numbers_of, plain_values
from appo.algorithms.runtime.messages import (
    Address,
    CopyWeights,
    Message,
    PolicyTraits,
    SetHyperparameters,
    ShapeRewards,
    TraitsSet,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.algorithms.runtime.roles import ACTOR, LEARNER
from appo.utils.failpoints import failpoint
from appo.utils.windows import RunningStatistic

log = logging.getLogger(__name__)

TRUE_REWARD = ("true_reward", "true_objective")
"""Words for the objective that episodes report beside rewards; Sample Factory 2 uses the second."""


@dataclass
class _OpenOrder:
    """A decision that is not yet carried out.

    Attributes:
        sent: whether the learner has the order; before, the decision is being written.
    """

    policy: int
    decision: PolicyDecision
    sent: bool = False

    @property
    def message(self) -> Message:
        """Return the order for the learner of the policy."""
        kind, source, traits = self.decision
        return CopyWeights(self.policy, traits, source) if kind == "copy" else SetHyperparameters(self.policy, traits)


class Controller:
    """Population-based training in main. The controller never waits: it takes reports and yields messages.

    A single order is open at a time, so no policy copies a policy that is being replaced. The clock of a policy counts
    its env steps. All values that must survive a crash, the clock included, are in the policy's `PolicyTraits`.
    """

    def __init__(
        self,
        exploit_explore: ExploitExplore,
        monitor: Monitor,
        lineage: Lineage,
        traits: Sequence[PolicyTraits],
        learning: Sequence[int],
        actors: int,
    ) -> None:
        self.exploit_explore, self.config = exploit_explore, exploit_explore.config
        self.monitor, self.lineage = monitor, lineage
        self.traits, self.learning, self.actors = list(traits), list(learning), range(actors)
        self._order: _OpenOrder | None = None
        self._outbox: list[Message] = []
        self._warned = set[str]()
        for policy in self.learning:
            if not any(event.policy == policy for event in lineage.events):
                tuned = {name: one.default for name, one in exploit_explore.tuned.items()}
                self._record(
                    "start", policy, policy, PolicyTraits(tuned, exploit_explore.shaping), self.traits[policy], {}
                )
        for policy in range(len(self.traits)):
            self._show(policy)

    def handle(self, message: Message) -> None:
        """Take in a report."""
        if isinstance(message, TraitsSet):
            self._done(message)
        elif isinstance(message, WorkerRestarted):
            self._again(message.process)

    def tick(self) -> Iterator[Message]:
        """Yield the messages to send now."""
        if self._order is None and self.config.with_pbt:
            self._order = self._next_order()
        if self._order is not None and not self._order.sent and self.lineage.written:
            failpoint("pbt.recorded")
            yield self._order.message
            self._order.sent = True
            failpoint("pbt.ordered")
        messages, self._outbox = self._outbox, []
        yield from messages

    def close(self) -> None:
        """Wait until all decisions are on disk."""
        self.lineage.close()

    def objectives(self) -> dict[int, float] | None:
        """Return the mean objective of every learning policy; None until all have played enough."""
        name, policies = self.config.pbt_target_objective, [self.monitor.policies[policy] for policy in self.learning]
        statistics = [objective_of(progress, name) for progress in policies]
        if nobody := all(one is None for one in statistics):  # else a policy that was replaced has not reported yet
            for progress in filter(lambda one: one.episodes, policies):
                known = ", ".join(name.removeprefix("stats/") for name in progress.statistics())
                instead = ": policies are ranked by reward" * (name in TRUE_REWARD)
                self._warn(f"no episode has reported {name} (--pbt_target_objective) so far, only {known}{instead}")
            if name in TRUE_REWARD:
                statistics = [progress.episode_return for progress in policies]
        found: dict[int, float] = {}
        for policy, statistic in zip(self.learning, statistics, strict=True):
            if statistic is None or statistic.count < self.config.pbt_min_episodes:
                count = self.monitor.policies[policy].episode_return.count
                if statistic is None and not nobody and count >= self.config.pbt_min_episodes:
                    self._warn(f"{name} (--pbt_target_objective) is in no episode of policy {policy}: all wait for it")
                return None
            found[policy] = statistic.mean
        return found

    def _warn(self, text: str) -> None:
        """Log a warning, each kind once."""
        if (kind := text.partition(" ")[0]) not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)

    def _next_order(self) -> _OpenOrder | None:
        """Decide about the most overdue policy, if all policies can be compared."""
        due = [(overdue, policy) for policy in self.learning if (overdue := self._overdue(policy)) > 0]
        objectives = self.objectives() if due else None
        if objectives is None or not all(self._env_steps(policy) for policy in self.learning):
            return None
        _, policy = max(due)
        decision = self.exploit_explore.decide(policy, self._env_steps(policy), objectives, self.traits)
        failpoint("pbt.decided")
        self._record(decision.kind, policy, decision.source, self.traits[policy], decision.traits, objectives)
        for rank, one in enumerate(rank_policies(objectives), start=1):
            self.monitor.policies[one].metrics |= {"pbt/rank": rank, "pbt/objective": objectives[one]}
        return _OpenOrder(policy, decision)

    def _overdue(self, policy: int) -> int:
        """Return the env steps by which a decision is overdue; negative: not due."""
        env_steps = self._env_steps(policy)
        since = env_steps - self.traits[policy].decided_env_steps
        return -1 if env_steps < self.config.pbt_start_mutation else since - self.config.pbt_period_env_steps

    def _env_steps(self, policy: int) -> int:
        return self.monitor.policies[policy].totals["env_steps"]

    def _done(self, message: TraitsSet) -> None:
        """Note, once, that a learner has other traits."""
        failpoint("pbt.told")
        policy, traits = message.policy, message.traits
        if traits.changes <= self.traits[policy].changes:
            return
        before, self.traits[policy] = self.traits[policy], traits
        if traits.adoptions != before.adoptions:
            self.monitor.policies[policy].start_afresh(traits.adoptions)
        self.monitor.policies[policy].version = message.version
        self.lineage.applied(policy, traits.changes, message.taken_env_steps)
        self._show(policy)
        if traits.reward_shaping != before.reward_shaping:
            self._tell_actors(self.actors, policy)
        if self._order is not None and self._order.policy == policy:
            self._order = None

    def _again(self, process: str) -> None:
        """Send orders and traits again to a replacement process."""
        for policy, traits in enumerate(self.traits):
            if process == str(Address(LEARNER.name, policy)):
                order = self._order if self._order is not None and self._order.policy == policy else None
                if order is not None and order.sent:
                    self._outbox.append(order.message)
                elif traits.changes:
                    self._outbox.append(SetHyperparameters(policy, traits))
            for actor in self.actors:
                if process == str(Address(ACTOR.name, actor)):
                    self._tell_actors([actor], policy)

    def _tell_actors(self, actors: Sequence[int], policy: int) -> None:
        if shaping := self.traits[policy].reward_shaping:
            self._outbox += [ShapeRewards(actor, policy, shaping) for actor in actors]

    def _record(
        self,
        kind: str,
        policy: int,
        source: int,
        before: PolicyTraits,
        after: PolicyTraits,
        objectives: Mapping[int, float],
    ) -> None:
        event = Event(
            kind=kind,
            policy=policy,
            source=source,
            change=after.changes,
            env_steps=self._env_steps(policy),
            source_env_steps=self._env_steps(source),
            elapsed_seconds=round(self.monitor.elapsed_seconds(time.monotonic()), 3),
            scores={str(p): one if math.isfinite(one) else None for p, one in objectives.items()},
            before=plain_values(before),
            after=plain_values(after),
            state="applied" if kind == "start" else "ordered",
        )
        self.lineage.add(event)
        if kind in ("copy", "mutation"):
            log.info("policy %d at %d env steps: %s", policy, event.env_steps, _words(event))

    def _show(self, policy: int) -> None:
        """Show a policy's hyperparameters and history in the reports."""
        traits = self.traits[policy]
        own = [event for event in self.lineage.events if event.policy == policy and event.state == "applied"]
        shown = {f"pbt/{name}": value for name, value in numbers_of(plain_values(traits)).items()}
        if self.config.with_pbt:
            copies = [event.source for event in own if event.kind == "copy"]
            shown |= {"pbt/copies": len(copies), "pbt/mutations": sum(event.kind == "mutation" for event in own)}
            shown |= {"pbt/copied_from": copies[-1]} if copies else {}
        self.monitor.policies[policy].metrics |= shown


def objective_of(progress: PolicyProgress, name: str) -> RunningStatistic | None:
    """Return the ranking statistic; None: not reported."""
    statistics = progress.statistics()
    names = [f"stats/{word}" for word in TRUE_REWARD] if name in TRUE_REWARD else [name, f"stats/{name}"]
    return next((statistics[name] for name in names if name in statistics), None)


def _words(event: Event) -> str:
    changes = [
        f"{name} {event.before.get(name)} -> {value}"
        for name, value in event.after.items()
        if value != event.before.get(name)
    ]
    return ", ".join([f"copies policy {event.source}" if event.kind == "copy" else "mutates", *changes])
