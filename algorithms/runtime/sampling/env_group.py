"""One vectorized environment and the trajectory slots it fills: the hot path of an actor worker.

A group waits for actions, takes a step, writes the step into its slot and requests the next actions. At the end of a
slot the group hands the slot over and continues in a free slot, or waits until a learner releases one. No other
back-pressure exists.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from appo.algorithms.runtime.callbacks import GroupHooks
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.output_ring import GroupTap
from appo.algorithms.runtime.memory.ownership import handed_over, take_back
from appo.algorithms.runtime.memory.slots import FinalObservations, Trajectories
from appo.algorithms.runtime.memory.weights import barrier
from appo.algorithms.runtime.messages import (
    WRITER_ADDRESS,
    ActionRequest,
    EpisodesDone,
    MatchResults,
    OpponentsReleased,
    SlotReleased,
    TrajectoryReady,
    Wake,
)
from appo.algorithms.runtime.sampling.episodes import Episodes, LostLives, SoftHorizon
from appo.algorithms.runtime.sampling.matchmaker import Matchmaker
from appo.envs.conversion import scale_rewards
from appo.envs.spec import GroupEnv, StepRow
from appo.utils.failpoints import failpoint
from appo.utils.timing import ENV, FRAMEWORK, clock

COUNTS = ("collected", "reset_rows", "trajectories", "sent", "released", "rebuilds")
NOTED = (*COUNTS, "episodes")  # as `Trajectories.group_counts` has them
Outgoing = ActionRequest | TrajectoryReady | EpisodesDone | MatchResults | OpponentsReleased | Wake


@dataclass(frozen=True)
class GroupPlan:
    """The settings of a group.

    Attributes:
        index: number of the group in the run.
        start: first step of the first trajectory, which spreads the completion of slots evenly over groups.
        num_policies: number of policies to draw from.
        num_past: number of past versions among the policies, at the end; no learner trains on their steps.
        past_share: probability of a game against a past version.
        per_row_policy: whether the agents of one env may play under different policies.
        policy_mapping: name of the user's function that chooses policies; empty: see `PolicyMatchmaker`.
        reward_shaping: reward coefficients of every policy that differ from the coefficients of the environment.
        reward_scale: factor on rewards for training.
        reward_clip: bound on their absolute value after scaling; 0: none.
        keep: never hand slots over (sampling speed only).
        generation: number of starts of the group's actor.
        exploring: for every row, whether its returns are reported apart; (): no row.
        soft_horizon: steps of an agent after which an episode ends in the statistics alone; 0: never.
        episodic_life: a lost life ends an episode in learning alone.
        whole_episodes: a slot contains one episode of the only row, and is handed over at the end of the episode.
        untimed: report episodes with every slot, independent of time; averages in main then follow from the steps
            alone.
        num_takers: number of workers among which the receiver of a hand-over is drawn; 0: learners, or workers beside
            the actor, receive all.
    """

    index: int
    slots: Sequence[int]
    start: int
    num_policies: int = 1
    num_past: int = 0
    past_share: float = 0.0
    per_row_policy: bool = True
    policy_mapping: str = ""
    reward_shaping: tuple[Mapping[str, Any], ...] = ()
    reward_scale: float = 1.0
    reward_clip: float = 0.0
    keep: bool = False
    generation: int = 0
    exploring: tuple[bool, ...] = ()
    soft_horizon: int = 0
    episodic_life: bool = False
    whole_episodes: bool = False
    untimed: bool = False
    num_takers: int = 0


@dataclass(slots=True)
class _StepViews:
    """Views of one step of one slot, made once: indexing would cost more than the rest of the step."""

    action: Array
    valid: Array
    out: StepRow


def only_policy(plan: GroupPlan, envs: GroupEnv, random: np.random.Generator) -> Matchmaker:
    """Return the matchmaker of a run with one policy."""
    return Matchmaker()


class EnvGroup:
    """Steps the environments of one group, and tracks their slot and step.

    Attributes:
        hooks: callbacks for the group; None without callbacks.
        tap: copier of slots for a dataset; None without a dataset.
    """

    hooks: GroupHooks | None = None
    tap: GroupTap | None = None

    def __init__(
        self,
        plan: GroupPlan,
        envs: GroupEnv,
        trajectories: Trajectories,
        finals: FinalObservations,
        seeds: np.random.SeedSequence,
        make_matchmaker: Callable[[GroupPlan, GroupEnv, np.random.Generator], Matchmaker] = only_policy,
    ) -> None:
        self.plan, self.envs, self.trajectories = plan, envs, trajectories
        env_seeds, policy_seeds = seeds.spawn(2)
        # 31 bits: some environments keep seeds in a signed int
        self.seeds = [int(s) >> 1 for s in env_seeds.generate_state(envs.num_rows // envs.spec.num_agents)]
        self.matchmaker = make_matchmaker(plan, envs, np.random.default_rng(policy_seeds))
        self.matchmaker.shaping[: len(plan.reward_shaping)] = plan.reward_shaping
        self._draw = np.random.default_rng(seeds.spawn(1)[0]) if plan.num_takers > 1 else None
        self.rollout = trajectories.valid.shape[1]
        self.soft_horizon = SoftHorizon(plan.soft_horizon, envs.num_rows) if plan.soft_horizon else None
        self.lives = LostLives(envs.num_rows) if plan.episodic_life else None
        self.steps = {slot: self._steps(slot, finals) for slot in plan.slots}
        self.free = deque(take_back(trajectories, plan.slots))
        self.slot, self.step = -1, plan.start
        self.previous, self.retiring = -1, False  # the slot filled last; whether no trajectory begins any more
        self._begun = False
        self.waiting: set[int] = set()  # policies whose actions the present step still lacks
        self.episodes = Episodes(envs.num_rows, plan.exploring)
        self._counts = trajectories.group_counts[plan.index]  # 0, unless an actor died in this place
        *counts, self.episodes.count = self._counts[: len(NOTED)].tolist()
        self.totals = dict(zip(COUNTS, counts, strict=True))
        self._rebuilds_before = self.totals["rebuilds"]
        repeated = sum(1 for _ in handed_over(trajectories, plan.slots, plan.generation))
        self.totals["released"] = self.totals["sent"] - repeated
        carried = trajectories.first[plan.slots[0], 0]
        self._carry_obs = {key: np.empty_like(a[plan.slots[0], 0]) for key, a in trajectories.obs.items()}
        self._carry_first = np.ones_like(carried)
        self._carry_policy = np.zeros(carried.shape, np.int32)

    def begin(self) -> Iterator[Outgoing]:
        """Request the first actions, after a reset of the environments.

        Hand-overs of an actor that died in this place are repeated, because their messages may be lost.
        """
        self._begun = True
        yield from handed_over(self.trajectories, self.plan.slots, self.plan.generation)
        yield from self._begin_trajectory()

    def reset(self) -> None:
        """Reset every environment; their first observations wait for the first slot."""
        self.envs.reset(self.seeds, self._carry_obs)
        self.episodes.cut[:] = self.envs.cut
        if self.tap is not None:
            self.tap.begin(self.step, self.envs.cut)
        self._draw_policies(self._carry_policy, self._carry_first)
        self.matchmaker.leave_out(self.envs.cut)

    def advance(self) -> Iterator[Outgoing]:
        """Take the step whose actions have arrived; request the next actions or hand the slot over."""
        slot, step = self.slot, self.step
        if step == self.rollout:  # only final values were missing
            yield from self._hand_over()
            return
        now = self.steps[slot][step]
        failpoint("actor.step")
        clock.enter(ENV)
        stats = self.envs.step(now.action, now.out)
        clock.enter(FRAMEWORK)
        if self.envs.spec.same_step:
            now.valid[:] = True
        else:
            np.logical_not(now.out.first, out=now.valid)
        num_valid = int(np.count_nonzero(now.valid))
        clock.collected += num_valid
        if self.soft_horizon is not None:
            self.soft_horizon.count(now.out, now.valid)
        if self.hooks is not None:
            stats = self.hooks.step(slot, step, now.out, stats, self.episodes.cut)
        self.episodes.record(now.out, now.valid, self.trajectories.policy_id[slot, step], stats)
        self.matchmaker.record(now.out, now.valid, self.trajectories.policy_id[slot, step])
        if num_valid < now.valid.size:
            self.episodes.forget(~now.valid)
        self._shape(now, step)
        if self.plan.num_policies > 1:
            self._carry_on_policies(slot, step)
            yield from self.matchmaker.answer(self.plan.index)
        self.step = step + 1
        if self.plan.whole_episodes and not num_valid:  # the next episode, for the next slot, has begun
            self._pad(slot, self.step)
            self.step = self.rollout
        if self.step < self.rollout or (now.out.has_final is not None and now.out.has_final.any()):
            yield from self._request()
        else:
            yield from self._hand_over()

    def _pad(self, slot: int, begin: int) -> None:
        """Mark the steps of a slot from `begin` on as not taken; the present observation becomes the last."""
        t = self.trajectories
        for array in t.obs.values():
            array[slot, self.rollout] = array[slot, begin]
        t.first[slot, begin:] = True
        t.policy_id[slot, begin:] = t.policy_id[slot, begin]
        for flags in (t.valid, t.terminated, t.truncated):
            flags[slot, begin:] = False

    def release(self, message: SlotReleased) -> Iterator[Outgoing]:
        """Take back a slot from one learner; continue if the group waits for the slot.

        A group in the place of a dead actor may receive releases before its environments are ready.
        """
        slot, owner = message.slot, self.trajectories.owner
        bit = 1 << message.policy
        if message.sequence != self.trajectories.sequence[slot] or not int(owner[slot]) & bit:
            return
        owner[slot] &= ~bit
        self.totals["released"] += 1
        if not owner[slot]:
            self.free.append(slot)
            if self._begun and self.slot < 0:
                clock.parked -= 1
                yield from self._begin_trajectory()

    def _steps(self, slot: int, finals: FinalObservations) -> list[_StepViews]:
        t, index, same_step = self.trajectories, self.plan.index, self.envs.spec.same_step
        final_obs = {key: a[index] for key, a in finals.final_obs.items()} if same_step else {}
        has_final = finals.has_final[index] if same_step else None
        return [
            _StepViews(
                t.action[slot, i],
                t.valid[slot, i],
                StepRow(
                    obs={key: a[slot, i + 1] for key, a in t.obs.items()},
                    first=t.first[slot, i + 1],
                    reward=t.reward[slot, i],
                    terminated=t.terminated[slot, i],
                    truncated=t.truncated[slot, i],
                    num_frames=t.num_frames[slot, i],
                    final_obs=final_obs,
                    has_final=has_final,
                    logical_end=None if self.soft_horizon is None else self.soft_horizon.ends,
                    lives=None if self.lives is None else self.lives.now,
                ),
            )
            for i in range(self.rollout)
        ]

    def _begin_trajectory(self) -> Iterator[Outgoing]:
        """Continue in a free slot, or wait until a learner releases one."""
        if self.retiring or not self.free:
            self.slot = -1
            clock.parked += 1
            return
        slot, t = self.free.popleft(), self.trajectories
        start = 0 if self.totals["trajectories"] else self.plan.start
        t.continues[slot] = self.previous
        t.follows[slot] = t.sequence[self.previous] if self.previous >= 0 else 0
        for key, row in self._carry_obs.items():
            t.obs[key][slot, start] = row
        t.num_frames[slot] = self.envs.spec.frames_per_step  # until the environment reports a number
        t.first[slot, start] = self._carry_first
        t.policy_id[slot, start] = self._carry_policy
        if start:  # the steps before a late start were never taken
            t.first[slot, : start + 1] = True
            t.valid[slot, :start] = False
            t.policy_id[slot, :start] = self._carry_policy
        self.slot, self.step = slot, start
        yield from self._request()

    def _request(self) -> Iterator[Outgoing]:
        self.waiting = set(self.matchmaker.present)
        if self.plan.num_policies > 1 and self.envs.spec.same_step and self.step:
            has_final = self.steps[self.slot][self.step - 1].out.has_final
            self.waiting.update(self.trajectories.policy_id[self.slot, self.step - 1][has_final].tolist())
        for policy in sorted(self.waiting):
            yield ActionRequest(policy, self.plan.index, self.slot, self.step, self.plan.generation)

    def _hand_over(self) -> Iterator[Outgoing]:
        """Hand the slot to the learners of the policies that acted in the slot, and begin the next trajectory."""
        slot, t, end = self.slot, self.trajectories, self.rollout
        self.previous = slot
        for key, row in self._carry_obs.items():
            row[:] = t.obs[key][slot, end]
        self._carry_first[:] = t.first[slot, end]
        self._carry_policy[:] = t.policy_id[slot, end]
        valid = int(np.count_nonzero(t.valid[slot]))
        self.totals["collected"] += valid
        self.totals["reset_rows"] += t.valid[slot].size - valid
        self.totals["trajectories"] += 1
        if self.tap is not None and self.tap.trajectory(slot, self.totals["trajectories"], valid):
            yield Wake(WRITER_ADDRESS)
        if self.hooks is not None:
            self.hooks.trajectory(slot)
        yield from self.episodes.flush(now=self.plan.untimed)
        yield from self.matchmaker.report()
        if self.plan.keep:
            self.free.append(slot)
        else:
            acted = np.unique(t.policy_id[slot, :end]).tolist() if self.plan.num_policies > 1 else [0]
            policies = [policy for policy in acted if policy < self.plan.num_policies - self.plan.num_past]
            self.totals["sent"] += len(policies)
            taker = 0 if self._draw is None else int(self._draw.integers(self.plan.num_takers))
            t.taker[slot] = taker
            t.sequence[slot] += 1
            barrier()  # readers of the owner see all of the slot
            t.owner[slot] = sum(1 << p for p in policies)
            self.note_counts()
            for policy in policies:
                yield TrajectoryReady(policy, slot, int(t.sequence[slot]), self.plan.generation, taker)
        yield from self._begin_trajectory()

    def end(self) -> Iterator[Outgoing]:
        """Report the rest at the end of a run; steps in a slot not handed over do not count."""
        t, taken = self.trajectories, slice(0, self.step if self.slot >= 0 else 0)
        self.matchmaker.finish(t.policy_id[self.slot, taken], t.valid[self.slot, taken])
        yield from self.episodes.flush(now=True)
        yield from self.matchmaker.report(now=True)

    def note_counts(self) -> None:
        """Store the totals for the next actor in this place."""
        self.totals["rebuilds"] = self._rebuilds_before + self.envs.rebuilds
        self._counts[: len(NOTED)] = [*self.totals.values(), self.episodes.count]

    def _shape(self, now: _StepViews, step: int) -> None:
        """Change the reward and the end of a step into what is learned from."""
        if self.lives is not None:
            self.lives.end(now.out, now.valid)
        reward = now.out.reward
        if self.tap is not None and (self.plan.reward_scale != 1.0 or self.plan.reward_clip):
            self.tap.reward(step, reward)
        scale_rewards(reward, self.plan.reward_scale, self.plan.reward_clip)

    def _carry_on_policies(self, slot: int, step: int) -> None:
        policy, first = self.trajectories.policy_id[slot], self.trajectories.first[slot, step + 1]
        policy[step + 1] = policy[step]
        if first.any():
            self._draw_policies(policy[step + 1], first)

    def _draw_policies(self, policy: Array, first: Array) -> None:
        self.matchmaker.draw(policy, first, self.plan.index * len(self.seeds), self.envs)
