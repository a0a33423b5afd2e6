import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.models.build import new_model
from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import plan_workers, topology_of
from appo.algorithms.run.plan import SEED_BRANCHES
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.heartbeat import Activity, Heartbeat
from appo.algorithms.runtime.memory.learner_state import ModelDescription, StateLayout, Vector
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import ActionRequest, Address, Begin, Message, PolicyTraits, Worker
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.roles import ACTOR, LEARNER, POLICY_WORKER, ROLES, Role
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.algorithms.runtime.sampling.policy_worker import PolicyWorker
from appo.algorithms.runtime.topology import Topology
from appo.envs.make import make_group

FLAGS = {
    "env": "toy/Counter-v0", "rollout": 8, "recurrence": 4, "batch_size": 32, "encoder_mlp_layers": [4],
    "hidden_size": 3, "reward_scale": 0.5, "reward_clip": 2.0, "max_policy_lag": 7,
}  # fmt: skip


def blueprint_of(placement: str = "serial", *, seed: int = 5, num_policies: int = 1, **flags: object) -> Blueprint:
    config = Config.from_flat({**FLAGS, **flags})
    spec = make_group(config.env, 1).spec
    flat = new_model(config.model, spec, "cpu")
    layout = APPO().layout(Context(spec, config.learning, config.model, "fp32", "cpu"), flat)
    description = ModelDescription(flat.table, flat.module.rnn_state_size, layout)  # type: ignore[arg-type]
    topology = Topology(placement, 2, 2, 3, num_policies, 1, rows=2, rollout=8)  # type: ignore[arg-type]
    budget = Budget(1000, 500, 60.0, None, None)
    return Blueprint(config, spec, (description,) * num_policies, topology, budget, "cpu", seed)


def plan_of(blueprint: Blueprint, name: str, arena: Arena, generation: int = 0) -> ProcessPlan:
    workers = blueprint.topology.processes()[name]
    unused = {"row": 0, "links": None, "log_path": Path(), "niceness": 0, "cores": frozenset(), "threads": 1}
    return ProcessPlan(name=name, workers=workers, arena=arena, generation=generation, **unused)  # type: ignore[arg-type]


def workers_of(blueprint: Blueprint, name: str, generation: int = 0) -> dict[str, object]:
    arena = Arena.create(blueprint.fields())
    made = blueprint(plan_of(blueprint, name, arena, generation), Heartbeat(arena, 0))
    return {str(address): worker for address, worker in made.items()}


def test_the_arena_holds_everything_the_workers_share() -> None:
    blueprint = blueprint_of("central", num_policies=2)
    fields = {field.name: field for field in blueprint.fields()}
    assert len(fields) == len(blueprint.fields())
    assert fields["Trajectories.obs.obs"].shape == (12, 9, 2, 4)
    assert fields["Trajectories.rnn_state"].shape == (12, 2, 2, 3)
    assert fields["heartbeat"].shape == (6, 16)
    weights = blueprint.model_of(0).num_weights
    for policy in range(2):
        assert fields[f"weights.{policy}.buffer"].shape == (2, weights)
        assert fields[f"state.{policy}.vectors.exp_avg"].shape == (2, weights)
        assert fields[f"state.{policy}.vectors.statistics"].shape == (2, 1 + 2 * 4 + 3)
    assert weights == len(new_model(blueprint.config.model, blueprint.spec, "cpu").flat)


def test_memory_follows_the_network_of_each_policy() -> None:
    """Two policies whose networks differ; a past version plays with that of policy 0."""
    alike = blueprint_of("central", num_policies=2)
    first = alike.model_of(0)
    vectors = {"weights": Vector(7), "own": Vector(3, "int64")}
    second = ModelDescription([("w", (7,))], first.rnn_state_size - 1, StateLayout(vectors, {}))
    topology = replace(alike.topology, num_past=1)
    blueprint = replace(alike, models=(first, second), topology=topology)
    fields = {field.name: field for field in blueprint.fields()}
    sizes = [fields[f"weights.{place}.buffer"].shape[1] for place in range(3)]
    assert sizes == [first.num_weights, 7, first.num_weights]
    assert fields["state.1.vectors.own"].shape == (2, 3)
    assert "state.1.vectors.exp_avg" not in fields
    arena = Arena.create(list(fields.values()))
    widths = [blueprint.trajectories(arena, policy).rnn_state.shape[-1] for policy in (None, 0, 1, 2)]
    assert widths == [3, 3, 2, 3]
    blueprint.trajectories(arena, 1).rnn_state[:] = 5.0
    assert blueprint.trajectories(arena, 0).rnn_state[0, 0, 0].tolist() == [5.0, 5.0, 0.0]


@pytest.mark.parametrize("placement", ["central", "local", "serial"])
def test_every_process_gets_its_workers(placement: str) -> None:
    blueprint = blueprint_of(placement)
    for name, addresses in blueprint.topology.processes().items():
        workers = workers_of(blueprint, name)
        assert list(workers) == [str(address) for address in addresses]
        kinds = {"actor": ActorWorker, "policy_worker": PolicyWorker, "learner": LearnerWorker}
        assert all(isinstance(workers[str(address)], kinds[address.role]) for address in addresses)


def test_frozen_policies_and_past_versions_have_no_learner_to_follow() -> None:
    blueprint = blueprint_of("central", num_policies=3, frozen_policies=[1])
    blueprint = replace(blueprint, topology=replace(blueprint.topology, num_past=2))
    learns = {
        str(address): worker.plan.learns
        for name in blueprint.topology.processes()
        for address, worker in workers_of(blueprint, name).items()
        if isinstance(worker, PolicyWorker)
    }
    assert list(learns.values()) == [True, False, True, False, False], learns


def test_a_blueprint_travels_to_processes() -> None:
    blueprint = blueprint_of()
    assert pickle.loads(pickle.dumps(blueprint)) == blueprint


def test_every_policy_has_a_context_of_its_own() -> None:
    blueprint = blueprint_of("central", num_policies=2)
    traits = (PolicyTraits(), PolicyTraits(hyperparameters={"gamma": 0.5}))
    blueprint = replace(blueprint, traits=traits, topology=replace(blueprint.topology, num_past=1))
    contexts = [blueprint.context(policy, "cpu") for policy in range(3)]
    assert [c.flags.gamma for c in contexts] == [blueprint.config.learning.gamma, 0.5, blueprint.config.learning.gamma]
    assert [(c.policy, c.num_policies) for c in contexts] == [(0, 3), (1, 3), (2, 3)]
    assert {(c.reward_scale, c.reward_clip) for c in contexts} == {(0.5, 2.0)}


def test_the_algorithm_is_that_of_the_flags() -> None:
    algorithm = blueprint_of().algorithm
    assert algorithm.name == Config().run.algo
    assert algorithm.flags is type(Config().learning)


def test_groups_know_their_place_and_their_part_of_the_flags() -> None:
    actor = workers_of(blueprint_of("central"), "actor_1")["actor_1"]
    assert isinstance(actor, ActorWorker)
    plans = [group.plan for group in actor.groups.values()]
    assert [(p.index, list(p.slots), p.start) for p in plans] == [(2, [6, 7, 8], 4), (3, [9, 10, 11], 6)]
    assert {(p.num_policies, p.reward_scale, p.reward_clip, p.keep) for p in plans} == {(1, 0.5, 2.0, False)}


@pytest.mark.parametrize(("restart_workers", "most"), [(True, 3), (False, 0)])
def test_actors_know_what_to_do_about_an_environment_that_fails(restart_workers: bool, most: int) -> None:
    flags = {"max_env_rebuilds": 3, "env_vectorization": "python", "restart_workers": restart_workers}
    blueprint = blueprint_of("central", experiment="run", **flags)
    actor = workers_of(blueprint, "actor_1")["actor_1"]
    assert isinstance(actor, ActorWorker)
    for group in actor.groups.values():
        env_set = group.envs._envs  # type: ignore[attr-defined]
        assert env_set._rule._most == most
        assert env_set._incidents.path == Path("train_dir/run/incidents").absolute()
        assert (env_set._incidents.worker, env_set._incidents.flags["env"]) == ("actor_1", "toy/Counter-v0")


def test_a_restarted_actor_starts_at_step_0_with_new_episodes() -> None:
    blueprint = blueprint_of("central")
    first, second = (workers_of(blueprint, "actor_1", generation)["actor_1"] for generation in (0, 1))
    assert isinstance(first, ActorWorker)
    assert isinstance(second, ActorWorker)
    assert [group.plan.start for group in second.groups.values()] == [0, 0]
    assert [group.plan.generation for group in second.groups.values()] == [1, 1]
    assert all(a.seeds != b.seeds for a, b in zip(first.groups.values(), second.groups.values(), strict=True))


def test_environments_are_reset_before_the_actor_is_ready_and_not_again() -> None:
    actor = workers_of(blueprint_of(), "main")["actor_0"]
    assert isinstance(actor, ActorWorker)
    group = actor.groups[0]
    carried = group._carry_obs["obs"].copy()
    assert carried[:, 0].tolist() == [group.seeds[0] % 2**16, group.seeds[0] % 2**16 + 1]
    resets: list[object] = []
    group.envs.reset = lambda *args: resets.append(args)  # type: ignore[method-assign]
    assert next(iter(actor.handle(Begin()))) == ActionRequest(0, 0, 0, 0, 0)
    assert resets == []


def test_sampling_only_keeps_the_slots_and_pauses_follow_the_flags() -> None:
    flags = {"sampler_only": True, "decorrelate_experience_max_seconds": 10.0}
    blueprint = blueprint_of("central", **flags)
    for name, pause in (("actor_0", 0.0), ("actor_1", 5.0)):
        actor = workers_of(blueprint, name)[name]
        assert isinstance(actor, ActorWorker)
        assert all(group.plan.keep for group in actor.groups.values())
        assert actor.pause_seconds == pause
    benchmark = workers_of(blueprint_of("central", **flags, benchmark=True), "actor_1")["actor_1"]
    assert isinstance(benchmark, ActorWorker)
    assert benchmark.pause_seconds == 0.0


def test_seeds_differ_between_workers_and_repeat_between_runs() -> None:
    blueprint = blueprint_of()
    places = [(branch, *index) for branch in SEED_BRANCHES for index in ((0,), (1,), (0, 0), (0, 1), (1, 0))]
    drawn = [tuple(blueprint.seeds(*place).generate_state(2)) for place in places]
    assert len(set(drawn)) == len(places)
    again = blueprint_of()
    assert [tuple(again.seeds(*place).generate_state(2)) for place in places] == drawn
    other = replace(blueprint, seed=6)
    assert not set(drawn) & {tuple(other.seeds(*place).generate_state(2)) for place in places}


def test_learners_start_from_the_seed_and_publish() -> None:
    def initial(seed: int, policy: int) -> torch.Tensor:
        blueprint = blueprint_of("central", seed=seed, num_policies=2)
        worker = workers_of(blueprint, f"learner_{policy}")[f"learner_{policy}"]
        assert isinstance(worker, LearnerWorker)
        _, weights = worker.ring.fetch(0)
        assert weights is not None
        assert weights.tolist() == worker.learner.flat.flat.tolist()
        return torch.from_numpy(weights)

    assert torch.equal(initial(5, 0), initial(5, 0))
    assert not torch.equal(initial(5, 0), initial(5, 1))
    assert not torch.equal(initial(5, 0), initial(6, 0))


def test_learners_know_the_budget_and_their_batches() -> None:
    flags = {"num_batches_per_iteration": 3, "num_minibatches_to_accumulate": 0}
    worker = workers_of(blueprint_of(**flags), "main")["learner_0"]
    assert isinstance(worker, LearnerWorker)
    assert (worker.plan.budget.env_steps, worker.plan.budget.samples, worker.plan.max_policy_lag) == (1000, 500, 7)
    batches = worker.batches
    assert (batches.num_columns, batches.max_policy_lag, batches.hold) == (12, 7, True)  # type: ignore[attr-defined]


def test_an_actor_that_makes_and_resets_environments_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(Heartbeat, "alive", lambda heartbeat: calls.append(None))
    blueprint = blueprint_of("local", env_vectorization="python", decorrelate_envs_on_one_worker=False)
    workers_of(blueprint, "actor_0")
    assert len(calls) == 2 * 2 * 2  # groups of two environments


def test_it_says_since_when_it_lives() -> None:
    blueprint = blueprint_of()
    heartbeat = Heartbeat(Arena.create(blueprint.fields()), 0)
    heartbeat.beat(Activity.RESETTING)
    before = heartbeat.read()
    heartbeat.alive()
    after = heartbeat.read()
    assert after.since > before.since
    assert after._replace(since=before.since) == before


def test_one_process_plays_and_learns_through_messages_alone() -> None:
    """The workers of a serial run, without the loop of main."""
    blueprint = blueprint_of()
    arena = Arena.create(blueprint.fields())
    workers = blueprint(plan_of(blueprint, "main", arena), Heartbeat(arena, 0))
    sent: list[object] = []
    node = Node(workers, blueprint.topology.address_book().address_of, sent.append)
    node.deliver(Begin())
    ring = WeightRing(arena, 0)
    turns = 0
    while ring.published < 6 and turns < 2000:
        node.turn()
        turns += 1
    assert ring.published == 6
    learner = next(worker for worker in workers.values() if isinstance(worker, LearnerWorker))
    totals = learner._report().totals
    assert totals["updates"] == totals["batches"] == 5
    actors = [worker.report().totals for worker in workers.values() if isinstance(worker, ActorWorker)]
    assert sum(t["collected"] for t in actors) == totals["samples"] + totals["discarded"] + totals["in_flight"]
    assert sum(t["sent"] for t in actors) == totals["trajectories"]
    assert sum(t["released"] for t in actors) == totals["released"]
    assert sum(t["collected"] + t["reset_rows"] for t in actors) == 16 * totals["trajectories"]


@pytest.mark.parametrize(("placement", "acting"), [("central", "cuda"), ("serial", "cuda"), ("local", "cpu")])
def test_inside_actors_acting_stays_on_the_cpu(placement: str, acting: str) -> None:
    blueprint = replace(blueprint_of(placement), device="cuda")
    assert blueprint.buffered
    assert (blueprint.device_of(LEARNER), blueprint.device_of(POLICY_WORKER)) == ("cuda", acting)
    assert not blueprint_of(placement).buffered


# An algorithm with shared memory and workers of its own.

SCRIBE = replace(POLICY_WORKER, name="scribe", worker="scribe_{index}.{member}")


class Scribe:
    """Knows what it was made of."""

    def __init__(
        self, address: Address, context: Context, slots: Trajectories, others: Mapping[Address, Worker]
    ) -> None:
        assert context.arena is not None
        self.address, self.context, self.slots, self.others = address, context, slots, list(others)
        self.notes = context.arena["scribe.notes"]

    def handle(self, message: Message) -> Iterator[Message]:
        yield from ()

    def pending(self) -> bool:
        return False

    def work(self) -> Iterator[Message]:
        yield from ()


class Writing(APPO):
    def fields(self, context: Context, topology: Topology, num_weights: int) -> list[Field]:
        shape = (topology.num_actors, num_weights, context.flags.rollout)
        return [Field("scribe.notes", shape, "int64")]

    def workers(self, topology: Topology) -> dict[Role, Role]:
        return {SCRIBE: ACTOR}

    def make_worker(self, *arguments: object) -> Scribe:
        return Scribe(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def writing() -> Iterator[Blueprint]:
    """A plan of an algorithm whose scribes sit beside the actors."""
    blueprint = blueprint_of("local", num_policies=2, algo=f"{__name__}:Writing", num_workers=2)
    further = topology_of(blueprint.config, plan_workers(blueprint.config, 2, "local"), num_agents=1).further
    yield replace(blueprint, topology=replace(blueprint.topology, further=further))
    del ROLES[SCRIBE.name]


def test_the_arena_holds_what_an_algorithm_declares(writing: Blueprint) -> None:
    arena = Arena.create(writing.fields())
    assert arena["scribe.notes"].shape == (2, writing.model_of(0).num_weights, 8)
    assert not arena["scribe.notes"].any()


def test_an_algorithm_makes_its_workers_when_the_others_of_the_process_are_made(writing: Blueprint) -> None:
    workers = workers_of(writing, "actor_1", generation=3)
    assert list(workers) == ["actor_1", "policy_worker_0.1", "policy_worker_1.1", "scribe_0.1", "scribe_1.1"]
    first, second = (workers[f"scribe_{policy}.1"] for policy in range(2))
    assert isinstance(first, Scribe)
    assert isinstance(second, Scribe)
    assert [str(address) for address in second.others] == list(workers)[:4]
    assert (second.context.policy, second.context.device) == (1, "cpu")
    assert first.context.torch_seed() != second.context.torch_seed()
    assert second.slots.owner.shape == (writing.topology.num_slots,)
    first.notes[:] = 7
    assert (second.notes == 7).all()


class Remembering(APPO):
    """Declares memory of each policy by its own flags, and some that all share."""

    def fields(self, context: Context, topology: Topology, num_weights: int) -> list[Field]:
        own = Field(f"own.{context.policy}", (int(10 * context.flags.gamma), num_weights), "float32")
        return [own, Field("all", (topology.num_policies,), "int64")]


class Disagreeing(APPO):
    def fields(self, context: Context, topology: Topology, num_weights: int) -> list[Field]:
        return [Field("all", (context.policy + 1,), "int64")]


def declaring(kind: type[APPO], monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    """Two policies with a gamma and a network of their own."""
    alike = blueprint_of("central", num_policies=2)
    monkeypatch.setattr(Blueprint, "algorithm", kind())
    second = replace(alike.model_of(0), table=[("w", (7,))])
    traits = (PolicyTraits(hyperparameters={"gamma": 0.9}), PolicyTraits(hyperparameters={"gamma": 0.5}))
    return replace(alike, models=(alike.model_of(0), second), traits=traits)


def test_every_policy_declares_the_memory_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    blueprint = declaring(Remembering, monkeypatch)
    fields = {field.name: field for field in blueprint.fields()}
    assert fields["own.0"].shape == (9, blueprint.model_of(0).num_weights)
    assert fields["own.1"].shape == (5, 7)
    assert [field.shape for field in blueprint.fields() if field.name == "all"] == [(2,)]


def test_memory_that_policies_share_they_declare_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="policies declare the field all in different ways"):
        declaring(Disagreeing, monkeypatch).fields()


def test_an_algorithm_that_declares_nothing_has_no_further_memory_and_workers() -> None:
    blueprint = blueprint_of("local", num_workers=2)
    topology = topology_of(blueprint.config, plan_workers(blueprint.config, 2, "local"), num_agents=1)
    assert topology.further == ()
    assert blueprint.algorithm.fields(blueprint.context(0, "cpu"), topology, 1) == ()
    with pytest.raises(NotImplementedError, match=r"^APPO declares scribe and does not make it$"):
        blueprint.algorithm.make_worker(Address(SCRIBE.name), blueprint.context(0, "cpu"), None, {})  # type: ignore[arg-type]
