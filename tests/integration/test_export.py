"""Policies as ONNX files: the same outputs as the network, the same actions as `load_policy` and enjoy."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from appo import load_policy
from appo.algorithms import cli
from appo.algorithms.models.actor_critic import ActingNetwork
from appo.algorithms.models.build import build_model
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.models.q_network import build_q_network
from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Player
from appo.algorithms.playing.policy import Policy
from appo.algorithms.playing.saved_run import SavedRun
from appo.algorithms.run.config import Config
from appo.envs.spaces import ActionForm, spec_of
from appo.utils.errors import UsageError
from appo.utils.run_folder import RunFolder

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from appo.algorithms.tools import export as exporting  # noqa: E402

ROOT = Path(__file__).parents[2]
OBSERVATIONS = 1000


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "experiment",
    ["cartpole", pytest.param("memory", marks=pytest.mark.slow), pytest.param("windowed", marks=pytest.mark.slow)],
)
def test_it_gives_the_actions_of_the_policy_on_a_thousand_observations(
    runs: Path,
    tmp_path: Path,
    experiment: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "policy.onnx"
    assert cli.run("export", [str(runs / experiment), "-o", str(path)]) == 0
    assert "checked on 1000 random observations" in capsys.readouterr().out
    session, policy = session_of(path), load_policy(runs / experiment)
    names = [each.name for each in session.get_inputs()]
    random = np.random.default_rng(0)
    state = np.zeros((1, policy.model.rnn_state_size), np.float32)
    for step in range(OBSERVATIONS):
        observation = random.normal(size=policy.spec.observations["obs"].shape).astype(np.float32)
        first = step == 0 or random.random() < 0.05
        if first:
            policy.reset()
        inputs = {"obs": observation[None], "first": np.array([first]), "rnn_state": state}
        action, _, _, *after = session.run(None, {name: inputs[name] for name in names})
        expected = policy.act(observation, deterministic=True)
        assert np.allclose(action[0], expected, atol=1e-5)
        state = after[0] if after else state
    if experiment == "cartpole":
        monkeypatch.chdir(tmp_path)
        of_onnx, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL)
        exec(of_onnx, {})
    assert json.loads(session.get_modelmeta().custom_metadata_map["appo"])["env_steps"] == policy.env_steps


BOX = spaces.Box(-1.0, 2.0, (3,), np.float32)
MASKED = spaces.Dict({"obs": BOX, "place": spaces.Discrete(4), "action_mask": spaces.Box(0, 1, (5,), np.int8)})
IMAGE = spaces.Dict({"obs": spaces.Box(0, 255, (40, 40, 3), np.uint8), "speed": BOX})
MIXED = spaces.Tuple((spaces.Discrete(3, start=7), spaces.Box(-0.1, 0.1, (2,)), spaces.MultiBinary(3)))
FAR = spaces.Tuple(
    (
        spaces.Discrete(3, start=7),
        spaces.Box(np.array([10, -0.01, 0], "f"), np.array([30, 0.01, np.inf], "f")),
        spaces.MultiBinary(3),
    )
)
PLAIN = {"use_rnn": False}
CASES = {
    "masked": (MASKED, spaces.Discrete(5, start=2), {"use_rnn": False, "normalize_input": False}),
    "lstm": (BOX, MIXED, {"rnn_type": "lstm", "rnn_num_layers": 2, "actor_critic_share_weights": False}),
    "image": (IMAGE, spaces.MultiDiscrete([2, 4]), {"normalize_images": True}),
    "impala": (IMAGE, spaces.Discrete(2), {"encoder_type": "resnet", "use_spectral_norm": True}),
    "residual": (BOX, MIXED, {"encoder_subtype": "mlp_residual", "encoder_mlp_layers": [16, 16]}),
    "scaled": (BOX, FAR, PLAIN),
    "squashed": (BOX, FAR, PLAIN | {"action_distribution": "tanh_gaussian", "adaptive_stddev": False}),
    "units of before": (BOX, FAR, PLAIN | {"action_scaling": "off"}),
}


def untrained(
    seen: tuple[spaces.Space[Any], spaces.Space[Any]],
    flags: dict[str, Any],
    build: Callable[..., ActingNetwork] = build_model,
) -> Policy:
    """A policy with random weights and statistics."""
    torch.manual_seed(0)
    config = Config.from_flat({"env": "none", "hidden_size": 16, "encoder_mlp_layers": [16], **flags})
    spec = spec_of(*seen, form=ActionForm.of(config.env))
    flat = FlatModule(build(config.model, spec))
    with torch.no_grad():
        flat.flat.add_(torch.rand(flat.flat.shape) * 0.2)
    flat.module.eval()
    player = Player(StochasticPolicy(flat, spec), spec, EvaluationConfig(), 0)
    return Policy(SavedRun(RunFolder(Path("none")), config, Path("none"), {}), player, seen, 7)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_model_and_space(tmp_path: Path, case: str) -> None:
    observation_space, action_space, flags = CASES[case]
    policy = untrained((observation_space, action_space), flags)
    path = tmp_path / "policy.onnx"
    assert exporting.export_policy(policy, path)[1] < exporting.TOLERANCE
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.onnx"]
    session = session_of(path)
    observation_space.seed(0)
    for number in range(20):
        observation = observation_space.sample()
        if case == "masked":
            observation["action_mask"][number % 5] = 1  # something is always allowed
        policy.reset()
        obs = policy._writer.empty(1)
        policy._writer.write_row(obs, 0, observation)
        inputs = obs | {"first": np.ones(1, np.bool_), "rnn_state": np.zeros((1, policy.model.rnn_state_size), "f")}
        names = [each.name for each in session.get_inputs()]
        action = session.run(["action"], {name: inputs[name] for name in names})[0][0]
        expected = spaces.flatten(action_space, policy.act(observation, deterministic=True))
        if isinstance(action_space, spaces.Tuple):  # flatten makes one-hot vectors of choices
            expected = np.concatenate([[7 + int(expected[:3].argmax())], expected[3:]])
        elif case != "impala" and isinstance(action_space, spaces.Discrete):
            expected = np.array([2 + int(expected.argmax())])
        elif isinstance(action_space, spaces.MultiDiscrete):
            expected = np.array([expected[:2].argmax(), expected[2:].argmax()])
        else:
            expected = np.array([expected.argmax()])
        assert np.allclose(action, expected, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"use_rnn": True}, id="memory", marks=pytest.mark.slow),
        pytest.param({"use_rnn": False}, id="no memory", marks=pytest.mark.slow),
    ],
)
def test_keys_that_are_called_as_other_inputs_outputs_or_what_is_inside(tmp_path: Path, flags: dict[str, Any]) -> None:
    taken = ["action", "first", "obs.value", "value"]
    inside = ["linear", "low"]  # as the exporter calls a layer and a buffer
    policy = untrained((spaces.Dict(dict.fromkeys([*taken, *inside], BOX)), spaces.Discrete(3)), flags)
    described = exporting.export_policy(policy, tmp_path / "policy.onnx")[0]["inputs"]
    keys = {name: entry["key"] for name, entry in described.items() if "key" in entry}
    assert keys == {
        "obs.action": "action",
        "obs.first": "first",
        "linear": "linear",
        "low": "low",
        "obs.value": "obs.value",
        "obs.obs.value": "value",
    }
    assert [one.name for one in session_of(tmp_path / "policy.onnx").get_inputs()] == list(described)


@pytest.mark.parametrize(
    ("flags", "has_value"),
    [
        ({"algo": "BC", "input": ["x"]}, False),
        ({"algo": "MARWIL", "input": ["x"]}, True),
        ({"algo": "MARWIL", "input": ["x"], "value_loss_coeff": 0.0}, False),
        ({"algo": "PPO", "value_loss_coeff": 0.0}, False),
        ({"algo": "A3C"}, True),
        ({"num_policies": 2, "per_policy": {"value_loss_coeff": [0.0, 0.5]}}, False),
        ({"num_policies": 2, "per_policy": {"value_loss_coeff": [0.5, 0.0]}}, True),
    ],
)
def test_a_value_that_nothing_has_learned_is_none(flags: dict[str, Any], has_value: bool) -> None:
    policy = untrained((BOX, spaces.Discrete(3)), PLAIN | flags)
    network = exporting._Network(policy.model, policy.spec, policy.action_space, has_value=policy.estimates_returns)
    assert network.outputs == ("action", "logits", *(["value"] if has_value else []))
    found = policy.compute_action(np.full(BOX.shape, 0.5, np.float32)).value
    assert (found is not None) == has_value


@pytest.mark.parametrize(
    ("flags", "build"), [({"algo": "BC", "input": ["x"]}, build_model), ({"algo": "PPO"}, build_policy_network)]
)
def test_a_policy_without_values_has_a_file_without_values(
    tmp_path: Path, flags: dict[str, Any], build: Callable[..., ActingNetwork]
) -> None:
    policy = untrained((BOX, spaces.Discrete(3)), PLAIN | flags, build)
    assert policy.compute_action(np.full(BOX.shape, 0.5, np.float32)).value is None
    described = exporting.export_policy(policy, tmp_path / "policy.onnx")[0]
    session = session_of(tmp_path / "policy.onnx")
    assert [one.name for one in session.get_outputs()] == list(described["outputs"]) == ["action", "logits"]


def test_the_value_of_a_choice_that_a_mask_forbids_is_not_the_value(tmp_path: Path) -> None:
    """Of values of actions the largest allowed one is what is expected."""
    flags = {"algo": "APEX", "use_rnn": False, "normalize_input": False, "encoder_mlp_layers": [16]}
    config, seen = Config.from_flat({"env": "none", **flags}), (MASKED, spaces.Discrete(5, start=2))
    spec = spec_of(*seen, form=ActionForm.of(config.env))
    torch.manual_seed(0)
    flat = FlatModule(build_q_network(config.model, spec, dueling=True))
    with torch.no_grad():
        flat.flat.add_(torch.rand(flat.flat.shape) * 0.5)
    flat.module.eval()
    player = Player(EpsilonGreedyPolicy(flat, spec, None, rescaled=False), spec, EvaluationConfig(), 0)
    policy = Policy(SavedRun(RunFolder(Path("none")), config, Path("none"), {}), player, seen, 7)
    assert exporting.export_policy(policy, tmp_path / "policy.onnx")[1] < exporting.TOLERANCE
    session = session_of(tmp_path / "policy.onnx")
    observation = MASKED.sample()
    for allowed in range(5):
        observation["action_mask"][:] = 0
        observation["action_mask"][allowed] = 1
        found = policy.compute_action(observation)
        assert found.value == pytest.approx(float(found.logits[allowed]), abs=1e-5)
        inputs = policy._writer.empty(1)
        policy._writer.write_row(inputs, 0, observation)
        (value,) = session.run(["value"], {one.name: inputs[one.name] for one in session.get_inputs()})
        assert value[0] == pytest.approx(found.value, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("added", [0.1, float("nan")])
def test_a_file_that_computes_something_else_is_not_kept(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: float
) -> None:
    write = exporting._write

    def other(network: Any, *arguments: Any) -> None:
        write(network, *arguments)
        outputs_of = network.outputs_of
        network.outputs_of = lambda obs, logits, value, state: outputs_of(obs, logits, value + added, state)

    monkeypatch.setattr(exporting, "_write", other)
    with pytest.raises(exporting.ExportError, match="differs from the policy by"):
        exporting.export_policy(load_policy(runs / "cartpole"), tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_without_its_packages_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "PACKAGES", ("onnxx", "onnxruntime", "ortt"))
    with pytest.raises(UsageError, match=r'needs onnxx and ortt: pip install "appo\[onnx\]"'):
        cli.run("export", ["x"])
    with pytest.raises(UsageError, match="appo export needs a run"):
        cli.run("export", [])


def test_a_place_for_no_file_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(runs / "cartpole")
    monkeypatch.setattr(exporting, "_write", lambda network, metadata, path: path.touch())
    monkeypatch.setattr(exporting, "_check", lambda *arguments: 0.0)
    for place in (Path("/"), runs, runs / "cartpole" / "config.json" / "x.onnx", runs / f"{'x' * 251}.onnx"):
        with pytest.raises(UsageError, match=r"^cannot write "):
            exporting.export_policy(policy, place)
