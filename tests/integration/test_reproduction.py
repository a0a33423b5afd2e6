"""With a learning rate of 0 the learner recomputes, from whole runs, exactly what the acting policy computed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from appo.algorithms.models.build import new_model
from appo.algorithms.models.encoders import Encoder
from appo.envs.toys.spaces import ACTIONS, OBSERVATIONS
from appo.utils.system import machine
from tests.integration.runs import SerialRun, record

ROLLOUT = 16
TOLERANCE = 1e-5  # of |difference| / (1 + |value|), in float32
FAULT = 1e-3
COMMON: dict[str, object] = {
    "learning_rate": 0,
    "verify_reproduction": True,
    "rollout": ROLLOUT,
    "batch_size": 128,
    "num_batches_per_iteration": 2,
    "ppo_epochs": 2,
    "encoder_mlp_layers": 24,
    "hidden_size": 24,
    "normalize_input": True,
    "normalize_returns": True,
    "num_envs_per_worker": 8,
    "train_for_env_steps": 3000,
}
MODELS: dict[str, dict[str, object]] = {
    "mlp": {"use_rnn": False},
    "gru": {"use_rnn": True, "rnn_type": "gru"},
    "lstm": {"use_rnn": True, "rnn_type": "lstm"},
    "gru-apart": {"use_rnn": True, "actor_critic_share_weights": False, "recurrence": ROLLOUT // 2},
}
ENVS: dict[str, dict[str, object]] = {
    "discrete": {"env": "CartPole-v1"},
    "box": {"env": "toy/Target-v0"},
    "same-step": {"env": "toy/Counter-v0", "env_kwargs": '{"autoreset_mode": "SameStep"}'},
    "agents": {"env": "toy/Shifts-v0"},
}
QUICK = {
    "serial": [("mlp", "box"), ("gru", "discrete"), ("gru-apart", "box"), ("lstm", "same-step")],
    "local": [("gru-apart", "discrete"), ("gru", "agents")],
    "central": [("lstm", "box"), ("mlp", "same-step")],
}
CASES = [
    pytest.param(inference, model, env, marks=[] if (model, env) in quick else pytest.mark.slow)
    for inference, quick in QUICK.items()
    for model in MODELS
    for env in ENVS
]


@pytest.mark.parametrize(("inference", "model", "env"), CASES)
def test_the_learner_reproduces_what_was_acted(tmp_path: Path, inference: str, model: str, env: str) -> None:
    workers = 1 if inference == "serial" else 2
    flags: dict[str, Any] = COMMON | MODELS[model] | ENVS[env] | {"inference": inference, "num_workers": workers}
    run = record(tmp_path / "run", **flags)
    assert run.series("train/reproduction_steps")[-1] == run.totals["samples"] >= 3000
    assert run.series("train/reproduction_error")[-1] <= TOLERANCE
    # It was no run of one version of the statistics, and acting and learning were apart where they can be.
    assert run.totals["updates"] >= 40
    assert inference == "serial" or max(run.reported("train/policy_lag_max")) > 0


@pytest.mark.parametrize(
    ("inference", "model"),  # the mlp acts without torch
    [
        pytest.param("central", "gru", marks=pytest.mark.slow),
        ("local", "mlp"),
        pytest.param("local", "gru", marks=pytest.mark.slow),
        pytest.param("central", "mlp", marks=pytest.mark.slow),
    ],
)
def test_policies_that_share_slots_are_reproduced(tmp_path: Path, inference: str, model: str) -> None:
    flags: dict[str, Any] = COMMON | MODELS[model] | ENVS["discrete"] | {"inference": inference, "num_workers": 2}
    run = record(tmp_path / "run", **flags | {"num_policies": 3, "train_for_env_steps": 2000})
    for policy in range(3):
        assert run.series("train/reproduction_steps", policy)[-1] == run.learners[policy]["samples"] >= 2000
        assert run.series("train/reproduction_error", policy)[-1] <= TOLERANCE


def serial_run(directory: Path, model: str, env: str = "discrete", **more: object) -> SerialRun:
    flags: dict[str, Any] = COMMON | MODELS[model] | ENVS[env] | {"train_for_env_steps": 1500} | more
    return SerialRun(directory, **flags)


class LaggingStatistics(dict[int, torch.Tensor]):
    """The weights of the version before the one asked for, as if an actor had not noticed the newest."""

    def __getitem__(self, version: int) -> torch.Tensor:
        return super().__getitem__(max(1, version - 1))


Unroll = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], Any]


def rolled_obs(obs: dict[str, torch.Tensor], first: torch.Tensor, dim: int) -> dict[str, torch.Tensor]:
    return {key: o.reshape(*first.shape, -1).roll(1, dim).reshape(o.shape) for key, o in obs.items()}


def one_stale_column(state: torch.Tensor) -> torch.Tensor:
    stale = state.clone()
    stale[:, 0] = 0
    return stale


FAULTS: dict[str, Callable[[Unroll], Unroll]] = {
    "ignores first": lambda unroll: lambda obs, first, state: unroll(obs, torch.zeros_like(first), state),
    "first is a step late": lambda unroll: lambda obs, first, state: unroll(obs, first.roll(1, 0), state),
    "rows shifted by one": lambda unroll: lambda obs, first, state: unroll(rolled_obs(obs, first, 1), first, state),
    "steps shifted by one": lambda unroll: lambda obs, first, state: unroll(rolled_obs(obs, first, 0), first, state),
    "state of the next row": lambda unroll: lambda obs, first, state: unroll(obs, first, state.roll(1, 1)),
    "not a number": lambda unroll: lambda obs, first, state: unroll(obs, first, state * torch.nan),
    "stale state of one column": lambda unroll: lambda obs, first, state: unroll(obs, first, one_stale_column(state)),
}


@pytest.mark.parametrize(
    ("model", "fault"),
    [("gru", fault) for fault in FAULTS] + [("mlp", "rows shifted by one"), ("lstm", "ignores first")],
)
def test_a_faulty_unroll_is_caught(tmp_path: Path, model: str, fault: str) -> None:
    run = serial_run(tmp_path / "run", model)
    learner = run.worker("learner").learner
    learner.model.unroll_scaled = FAULTS[fault](learner.model.unroll_scaled)
    for _ in run.turns():
        pass
    assert learner.compared >= 1500
    assert learner.largest > FAULT


def test_statistics_of_another_version_are_caught(tmp_path: Path) -> None:
    run = serial_run(tmp_path / "run", "mlp")
    learner = run.worker("learner").learner
    learner.published = LaggingStatistics(learner.published)
    for _ in run.turns():
        pass
    assert learner.largest > FAULT


def test_without_a_fault_the_same_run_is_reproduced(tmp_path: Path) -> None:
    run = serial_run(tmp_path / "run", "gru")
    for _ in run.turns():
        pass
    learner = run.worker("learner").learner
    assert learner.compared >= 1500
    assert learner.largest <= TOLERANCE


@pytest.mark.parametrize("env", ["discrete", "box"])
def test_what_acts_without_torch_has_the_log_probs_of_the_learner(tmp_path: Path, env: str) -> None:
    run = serial_run(tmp_path / "run", "mlp", env)
    assert run.worker("policy_worker").chance.fast is not None
    assert mean_log_prob_gap(run) <= TOLERANCE


@pytest.mark.parametrize("model", ["gru", *(pytest.param(model, marks=pytest.mark.slow) for model in ("mlp", "lstm"))])
def test_in_bf16_acting_and_learning_hardly_differ(tmp_path: Path, model: str) -> None:
    image: dict[str, Any] = {"env": "toy/Spaces-v0", "env_kwargs": '{"observation": "image_hwc"}', "obs_scale": 255}
    flags: dict[str, Any] = COMMON | MODELS[model] | image | {"encoder_type": "conv", "train_for_env_steps": 300}
    run = SerialRun(tmp_path / "run", **flags, precision="bf16")
    acting, learner = run.worker("policy_worker"), run.worker("learner").learner
    gap = mean_log_prob_gap(run)
    assert gap <= 1e-2
    encoders = {p.dtype for name, p in acting.policy.flat.module.named_parameters() if "encoder" in name}
    heads = {p.dtype for name, p in acting.policy.flat.module.named_parameters() if "head" in name}
    assert (encoders, heads) == ({torch.bfloat16}, {torch.float32})
    assert learner.learner.optimizer.gradient.abs().max() > 0
    state = learner.state().weights
    assert np.abs(state - torch.from_numpy(state).bfloat16().float().numpy()).max() > 0  # not rounded anywhere


def mean_log_prob_gap(run: SerialRun) -> float:
    """Mean |log pi(a|s) of acting - of learning| over the whole run, with a learning rate of 0 and fixed statistics."""
    learner, gaps = run.worker("learner").learner, []
    compare = learner.compare

    def noted(batch: Any) -> None:
        compare(batch)
        last = batch.policy_version == learner.version  # the statistics are those of the acting version
        with torch.no_grad():
            policy, _ = learner.learner.unroll(batch)
        gap = (policy.log_prob(batch.action) - batch.recorded["log_prob"]).abs()
        gaps.append(gap[batch.valid & last])

    learner.compare = noted
    for _ in run.turns():
        pass
    return float(torch.cat(gaps).mean())


# --- every encoder, space and core; what is not in the quick cases is marked slow

IMAGES: dict[str, dict[str, object]] = {
    subtype: {"encoder_type": kind, "encoder_subtype": subtype, "observation": "image_hwc"}
    for kind, subtype in [
        ("conv", "convnet_simple"),
        ("conv", "convnet_atari"),
        ("conv", "convnet_dqn"),
        ("conv", "convnet_impala"),
        ("resnet", "resnet_impala"),
    ]
}
SPACES: dict[str, dict[str, object]] = (
    {
        subtype: {"encoder_type": "mlp", "encoder_subtype": subtype, "observation": "image_chw"}
        for subtype in ("mlp", "mlp_residual")
    }
    | IMAGES
    | {f"{name}-chw": case | {"observation": "image_chw"} for name, case in IMAGES.items()}
    | {f"{name}-dict": case | {"observation": "image_and_vector"} for name, case in IMAGES.items()}
    | {f"observation-{name}": {"observation": name} for name in OBSERVATIONS}
    | {f"action-{name}": {"action": name} for name in ACTIONS}
    | {
        f"mask-{where}-{mode.value}": {"action": "tuple", "mask": where, "autoreset_mode": mode.value}
        for where in ("observation", "info")
        for mode in AutoresetMode
    }
    | {f"mask-{where}-python": {"action": "dict", "mask": where} for where in ("observation", "info")}
)
QUICK_SPACES = {
    *(("mlp", name) for name in ("mlp", *IMAGES, "observation-tuple", "mask-info-SameStep") if "impala" not in name),
    *(("gru", name) for name in ("convnet_simple-dict", "action-tuple", "action-multi_binary")),
    *(("lstm", name) for name in ("observation-dict", "action-dict", "mask-observation-python")),
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=[] if (model, name) in QUICK_SPACES else pytest.mark.slow)
        for model in ("mlp", "gru", "lstm")
        for name in SPACES
    ],
)
def test_every_encoder_space_and_core_is_reproduced(tmp_path: Path, model: str, name: str) -> None:
    case = SPACES[name]
    env_kwargs = {key: case[key] for key in ("observation", "action", "mask", "autoreset_mode") if key in case}
    flags: dict[str, Any] = COMMON | MODELS[model] | {key: case[key] for key in case if key not in env_kwargs}
    flags |= {"env": "toy/Spaces-v0", "env_kwargs": json.dumps(env_kwargs), "obs_scale": 255, "num_envs_per_worker": 8}
    flags |= {"env_vectorization": "native" if "autoreset_mode" in case else "python", "train_for_env_steps": 600}
    run = SerialRun(tmp_path / "run", **flags)
    for _ in run.turns():
        pass
    learner = run.worker("learner").learner
    assert learner.compared >= 600
    assert learner.largest <= TOLERANCE


@dataclass(frozen=True)
class Slot:
    """A copy of a slot as it was handed over."""

    obs: dict[str, torch.Tensor]
    first: torch.Tensor
    version: np.ndarray
    rnn_state: torch.Tensor


def collect_slots(run: SerialRun, stale_at: int | None = None) -> list[Slot]:
    """Every slot of the run's one group, in order; at one turn the live state may miss a step."""
    shared = run.blueprint.trajectories(run.arena)
    live = run.worker("policy_worker").live_state
    slots, handed_over, before = [], shared.sequence.copy(), live.clone()
    for turn in run.turns():
        if turn == stale_at:
            live.copy_(before)
        before.copy_(live)
        for slot in np.flatnonzero(shared.sequence != handed_over):
            obs = {key: torch.from_numpy(a[slot].copy()) for key, a in shared.obs.items()}
            first, state = (torch.from_numpy(a[slot].copy()) for a in (shared.first, shared.rnn_state))
            slots.append(Slot(obs, first, shared.policy_version[slot].copy(), state))
        handed_over = shared.sequence.copy()
    return slots


@torch.no_grad()
def largest_gap(run: SerialRun, slots: list[Slot]) -> float:
    """Unroll every slot from its stored state: the largest |difference| to the states stored after that."""
    flat = new_model(run.config.model, run.blueprint.spec, "cpu")
    published, segment = run.worker("learner").learner.published, run.config.learning.segment_steps
    gap = 0.0
    for slot, following in pairwise(slots):
        assert all(torch.equal(slot.obs[key][ROLLOUT], following.obs[key][0]) for key in slot.obs)
        assert torch.equal(slot.first[ROLLOUT], following.first[0])
        stored = [*slot.rnn_state, following.rnn_state[0]]
        state = stored[0]
        for step in range(ROLLOUT):
            (version,) = set(slot.version[step].tolist())
            flat.flat.copy_(published[version])
            _, _, state = flat.module.act({k: o[step] for k, o in slot.obs.items()}, slot.first[step], state)
            if (step + 1) % segment == 0:
                gap = max(gap, float((state - stored[(step + 1) // segment]).abs().max()))
    return gap


@pytest.mark.parametrize(("model", "env"), [("gru", "discrete"), ("lstm", "box"), ("gru-apart", "discrete")])
def test_the_recurrent_state_is_continuous_across_slots(tmp_path: Path, model: str, env: str) -> None:
    run = serial_run(tmp_path / "run", model, env)
    slots = collect_slots(run)
    assert len(slots) >= 10
    assert sum(bool(slot.rnn_state[0].abs().max() > 0.01) for slot in slots) >= len(slots) - 1
    assert largest_gap(run, slots) <= TOLERANCE


def test_a_state_that_missed_a_step_is_caught(tmp_path: Path) -> None:
    run = serial_run(tmp_path / "run", "gru", policy_initialization="torch_default")  # values that differ from 0
    assert largest_gap(run, collect_slots(run, stale_at=5 * ROLLOUT + 7)) > FAULT
    assert run.worker("learner").learner.largest > FAULT


def test_every_learner_of_a_process_shares_its_images_among_the_threads(tmp_path: Path) -> None:
    flags = COMMON | {"env": "toy/Spaces-v0", "env_kwargs": json.dumps({"observation": "image_hwc"}), "obs_scale": 255}
    machine.limit_threads(2)
    try:
        run = SerialRun(tmp_path / "run", **flags | {"num_policies": 2})
        encoders = [
            [part for part in run.worker("learner", policy).learner.model.modules() if isinstance(part, Encoder)]
            for policy in (0, 1)
        ]
        assert [[encoder.threads for encoder in some] for some in encoders] == [[0], [0]]  # those of the process
        assert torch.get_num_threads() == 1
    finally:
        machine.limit_threads(1)
