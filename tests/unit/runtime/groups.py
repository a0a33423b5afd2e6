"""Environment groups that are stepped without any policy worker."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from appo.algorithms.population.matchmaking import matchmaker_of
from appo.algorithms.runtime.messages import ActionRequest, EpisodesDone, Message, SlotReleased, TrajectoryReady
from appo.algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, EpisodeStats, ObservationSpec, StepRow
from tests.unit.runtime.worlds import World, world_of


class PairEnv:
    """Two agents per env whose episodes all end together after `length` steps; for what single-agent toys lack."""

    def __init__(self, num_envs: int, length: int) -> None:
        self.spec = EnvSpec({"obs": ObservationSpec((1,), "float32")}, ActionSpec((ActionPart("categorical", 2),)), 2)
        self.num_rows, self.length, self.steps = 2 * num_envs, length, 0
        self.rebuilds = 0
        self.cut, self.said = np.zeros(self.num_rows, bool), set[str]()

    def reset(self, seeds: Sequence[int], obs: dict[str, np.ndarray]) -> None:
        assert len(seeds) == self.num_rows // 2
        obs["obs"][:], self.steps = 0, 0

    def step(self, action: np.ndarray, row: StepRow) -> Sequence[EpisodeStats]:
        row.first[:] = self.steps == self.length
        self.steps = 0 if row.first[0] else self.steps + 1
        row.terminated[:], row.truncated[:] = self.steps == self.length, False
        row.obs["obs"][:], row.reward[:] = self.steps, 0.0 if row.first[0] else 1.0
        return ()

    def close(self) -> None:
        pass


class Played:
    """A group, the world it writes into, and everything it has said.

    Args:
        plan: flags of `GroupPlan`.
        same_step: autoreset mode of the Counter toys that are played when `envs` is None.
    """

    def __init__(
        self, *, rows: int = 3, rollout: int = 4, slots: int = 2, same_step: bool = False, envs: PairEnv | None = None,
        **plan: object,
    ) -> None:  # fmt: skip
        mode = "SameStep" if same_step else "NextStep"
        config = EnvConfig(env="toy/Counter-v0", env_kwargs={"autoreset_mode": mode})
        made = envs or make_group(config, rows)
        num_policies = int(plan.get("num_policies", 1))  # type: ignore[call-overload]
        self.world: World = world_of(
            made.spec, groups_per_actor=1, slots_per_group=slots, rows=made.num_rows, rollout=rollout,
            num_policies=num_policies,
        )  # fmt: skip
        self.trajectories = self.world.trajectories
        poison(self.world)
        self.plan = GroupPlan(index=0, slots=range(slots), **{"start": 0, **plan})  # type: ignore[arg-type]
        self.envs = made
        self.group = self.succeed()
        self.rng = np.random.default_rng(1)
        self.said: list[Message] = []
        self.new: deque[Message] = deque()

    def succeed(self, generation: int | None = None) -> EnvGroup:
        """Put another group into the place of the one that is there, as after its actor's death."""
        self.plan = self.plan if generation is None else replace(self.plan, generation=generation)
        self.group = EnvGroup(
            self.plan, self.envs, self.trajectories, self.world.finals, np.random.SeedSequence(5), matchmaker_of
        )
        return self.group

    def begin(self) -> "Played":
        self.group.reset()
        self.hear(self.group.begin())
        return self

    def hear(self, messages: Iterable[Message]) -> list[Message]:
        heard = list(messages)
        self.said += heard
        return heard

    def step(self) -> list[Message]:
        """Take the step the group waits to take, with random actions."""
        group, t = self.group, self.trajectories
        if group.step < group.rollout:
            action = t.action[group.slot, group.step]
            action[:] = self.rng.integers(2, size=action.shape)
        return self.hear(group.advance())

    def steps(self, count: int) -> list[Message]:
        return [message for _ in range(count) for message in self.step()]

    def trajectory(self) -> list[Message]:
        """Step until the group has handed over once more; what it said meanwhile."""
        before, heard = self.group.totals["trajectories"], []
        while self.group.totals["trajectories"] == before:
            heard += self.step()
        return heard

    def release(self, message: TrajectoryReady) -> list[Message]:
        return self.hear(self.group.release(SlotReleased(message.policy, message.slot, message.sequence)))


def requests(messages: Iterable[Message]) -> list[ActionRequest]:
    return [m for m in messages if isinstance(m, ActionRequest)]


def ready(messages: Iterable[Message]) -> list[TrajectoryReady]:
    return [m for m in messages if isinstance(m, TrajectoryReady)]


def episodes(messages: Iterable[Message]) -> list[tuple[int, float, int]]:
    """(policy, return, length) of all episodes."""
    done = [m for m in messages if isinstance(m, EpisodesDone)]
    return [
        (int(p), float(r), int(n)) for d in done for p, r, n in zip(d.policy, d.episode_return, d.length, strict=True)
    ]


def poison(world: World) -> None:
    """Garbage everywhere: what should have been written and was not is found out."""
    t = world.trajectories
    for array in (t.first, t.valid, t.terminated, t.truncated, world.finals.has_final):
        array[:] = True
    world.finals.has_final[:] = False
    for array in (t.reward, t.recorded["final_value"], *t.obs.values(), *world.finals.final_obs.values()):
        array[:] = 77
    t.policy_id[:] = 77 * (world.topology.num_policies > 1)  # who can only be 0 is not written
