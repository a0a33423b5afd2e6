"""`appo export` writes a policy as an ONNX file that needs neither torch nor this framework, and checks the file."""

import contextlib
import copy
import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils import parametrize

from appo.algorithms.models.actor_critic import ActingNetwork
from appo.algorithms.models.encoders import Encoder
from appo.algorithms.models.q_network import QNetwork
from appo.algorithms.ops.distributions import ActionDistribution
from appo.algorithms.playing.policy import Policy, Which, load_policy
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.tools.flags import ExportConfig
from appo.envs.masks import CHOICES
from appo.envs.spaces import Space, choices_of, flat_action_spaces
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.command_line import say
from appo.utils.errors import AppoError, UsageError
from appo.utils.files import replaced_when_whole

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MEMORY = ("first", "rnn_state")
ACTION, VALUE, NEXT_STATE = "action", "value", "next_rnn_state"
TAKEN = (*MEMORY, ACTION, ActingNetwork.logits_name, QNetwork.logits_name, VALUE, NEXT_STATE)
"""Names of inputs and outputs, not available for keys of observations."""
BATCH_NAME, METADATA_KEY = "rows", "appo"
CHECKED_ROWS, CHECKED_STEPS = 50, 20
TOLERANCE = 1e-4  # of logits, values and states, relative to 1 + their size
MOST_OTHER_ACTIONS = 0.002  # share of checked actions: rounding decides between nearly equal choices
Values = dict[str, Array]
log = logging.getLogger("torch.onnx._internal.exporter._registration")
"""Logger that warns of packages not needed here."""


class ExportError(AppoError):
    """The exported file does not compute the actions or values of the policy."""


def export(config: ExportConfig) -> int:
    """Write the file and print the contents; return the exit code.

    Raises:
        UsageError: a package or the run is missing, or the file cannot be written.
        ExportError: ONNX cannot express the model, or computes different outputs; no file is left.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f'appo export needs {" and ".join(missing)}: pip install "appo[onnx]"')
    which, path = cast(Which, config.load_checkpoint_kind), Path(config.output)
    policy = load_policy(
        config.run,
        policy=config.policy_index,
        which=which,
        train_dir=config.train_dir,
        trust=config.trust,
        env=config.env,
    )
    described, worst = export_policy(policy, path)
    say(f"{path}: policy {config.policy_index} of {policy.run.directory.name} at {policy.env_steps} env steps")
    for name, one in described["inputs"].items():
        say(f"  input   {name:16} {one['dtype']:8} [{', '.join([BATCH_NAME, *map(str, one['shape'])])}]")
    for name, meaning in described["outputs"].items():
        say(f"  output  {name:16} {meaning}")
    say(f"checked on {CHECKED_ROWS * CHECKED_STEPS} random observations: the largest difference is {worst:.1g}")
    return 0


def export_policy(policy: Policy, path: Path) -> tuple[dict[str, Any], float]:
    """Write a policy to an ONNX file, checked before the rename to `path`.

    Returns:
        The JSON under the key `appo` of the file's metadata, and the largest difference between an output of the file
        and the policy.

    Raises:
        UsageError: the file cannot be written.
        ExportError: ONNX cannot express the model, or computes different outputs.
    """
    network = _Network(policy.model, policy.spec, policy.action_space, has_value=policy.estimates_returns).eval()
    described = _description(policy, network)
    with replaced_when_whole(path) as temporary:
        _write(network, described, temporary)
        worst = _check(network, policy.model, temporary)
    return described, worst


class _Network(nn.Module):
    """A copy of a policy as a function of tensors.

    Attributes:
        keys: key of an observation -> name of the input.
        inputs, outputs: names of inputs and outputs.
        is_real: [A] bool: whether a value of an action is a real number.
    """

    is_squashed: Tensor
    low: Tensor
    high: Tensor
    scale: Tensor
    start: Tensor
    least: Tensor
    most: Tensor

    def __init__(self, model: ActingNetwork, spec: EnvSpec, action_space: Space, *, has_value: bool) -> None:
        super().__init__()
        self.has_value = has_value
        self.model, self.parts = _copy(model), spec.action.parts
        self.keys = _input_names((*model.keys, MASK_KEY) if spec.action_mask else model.keys)
        self.has_memory = model.rnn_state_size > 0
        self.inputs = (*self.keys.values(), *(MEMORY if self.has_memory else ()))
        self.outputs = (ACTION, model.logits_name, *[VALUE] * has_value, *[NEXT_STATE] * self.has_memory)
        self.specs = {key: spec.observations[key] for key in self.keys}
        self.is_real, self.squashes = np.array(spec.action.is_real), any(spec.action.is_squashed)
        self.register_buffer("is_squashed", torch.tensor(spec.action.is_squashed))
        dtype = torch.float32 if spec.action.bins else getattr(torch, spec.action.dtype)
        for name, values in _ranges(spec, action_space).items():
            self.register_buffer(name, torch.tensor(values, dtype=dtype))

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return outputs of a batch of rows, with the most probable actions in units of the environment, flattened."""
        obs, first, state = self.arguments(dict(zip(self.inputs, tensors, strict=True)))
        # Encoders take bytes in pieces through a buffer, and floats at once.
        return self.outputs_of(obs, *self.model.act_scaled(self.model.scaled(obs), first, state))

    def arguments(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the arguments of `ActingNetwork.act`; without a memory the state is empty."""
        obs = {key: inputs[name] for key, name in self.keys.items()}
        if self.has_memory:
            return obs, inputs["first"], inputs["rnn_state"]
        rows = next(iter(obs.values())).shape[0]
        return obs, torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, 0)

    def outputs_of(
        self, obs: dict[str, Tensor], logits: Tensor, value: Tensor | None, state: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the file from outputs of the model."""
        mode = ActionDistribution(self.parts, logits, obs[MASK_KEY].flatten(1) > 0 if MASK_KEY in obs else None).mode()
        if self.squashes:
            mode = torch.where(self.is_squashed, mode.tanh(), mode)
        mode = mode.to(self.low.dtype)
        action = torch.minimum(torch.maximum(mode, self.low), self.high) * self.scale + self.start
        action = torch.minimum(torch.maximum(action, self.least), self.most)  # rounding may pass a bound
        estimate = self.model.value_of(obs, logits, value) if self.has_value else None
        return (action, logits, *([] if estimate is None else [estimate]), *[state] * self.has_memory)

    def examples(self, rows: int, generator: torch.Generator) -> Values:
        """Return random observations in the range of the model's normalization."""
        drawn = {name: self._draw(key, rows, generator) for key, name in self.keys.items()}
        if self.has_memory:
            drawn["first"] = torch.rand(rows, generator=generator) < 0.1
            drawn["rnn_state"] = torch.zeros(rows, self.model.rnn_state_size)
        return {name: value.numpy() for name, value in drawn.items()}

    def _draw(self, key: str, rows: int, generator: torch.Generator) -> Tensor:
        spec = self.specs[key]
        shape = (rows, *spec.shape)
        if key == MASK_KEY:
            allowed = (torch.rand(shape, generator=generator) < 0.7).flatten(1)
            sizes = [part.size for part in self.parts if part.kind == "categorical"]
            allowed[:, np.cumsum([0, *sizes[:-1]])] = True  # at least one choice must be allowed
            return allowed.to(torch.uint8).reshape(shape)
        if spec.dtype == "uint8":
            return torch.randint(0, spec.high + 1, shape, generator=generator).to(torch.uint8)
        x = torch.randn(shape, generator=generator)
        scaling = self.model.scaling_of(key)
        return x / scaling.inv_std + scaling.mean if scaling.running else x * scaling.scale + scaling.subtract_mean


def _input_names(keys: Sequence[str]) -> dict[str, str]:
    """Return key of an observation -> name of the input: the key, with a prefix if the name is taken."""
    names = {key: key for key in keys}
    for key in keys:
        while names[key] in TAKEN or list(names.values()).count(names[key]) > 1:
            names[key] = f"obs.{names[key]}"
    return names


def _description(policy: Policy, network: _Network) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        name: {"key": key, "dtype": network.specs[key].dtype, "shape": list(network.specs[key].shape)}
        for key, name in network.keys.items()
    }
    if network.has_memory:
        inputs["first"] = {"dtype": "bool", "shape": []}
        inputs["rnn_state"] = {"dtype": "float32", "shape": [policy.model.rnn_state_size]}
    meanings = {
        ACTION: "the most probable action as the environment takes it, flattened",
        network.model.logits_name: network.model.logits_meaning,
        VALUE: "expected return from here",
        NEXT_STATE: "rnn_state of the next step",
    }
    return {
        "env": policy.run.config.env.env,
        "env_steps": policy.env_steps,
        "observation_space": str(policy.observation_space),
        "action_space": str(policy.action_space),
        "action_parts": [list(part) for part in policy.spec.action.parts],
        "inputs": inputs,
        "outputs": {name: meanings[name] for name in network.outputs},
    }


def _copy(model: ActingNetwork) -> ActingNetwork:
    """Copy the network with separate weights, without parts for speed or training."""
    copied = copy.deepcopy(model).eval()
    for module in list(copied.modules()):
        if isinstance(module, Encoder):
            module.num_image_layers = 0  # all images at once
        if parametrize.is_parametrized(module, "weight"):  # computed by spectral normalization
            # A plain weight; torch's own function would change the original too, which has this class.
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            module.__class__ = type(module).__bases__[0]
            del module.parametrizations
            module.weight = nn.Parameter(weight.detach().clone())
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor.data = tensor.data.clone()  # tensors of the original are views of one vector
    return copied


def _ranges(spec: EnvSpec, action_space: Space) -> dict[str, list[float]]:
    """Return limits of stored action values, the map to units of the environment, and the limits in these units."""
    action, reals = spec.action, len(spec.action.low or ())
    numbers = zip(
        action.low or (), action.high or (), action.scale or [1.0] * reals, action.shift or [0.0] * reals, strict=True
    )
    rows: list[tuple[float, ...]] = []  # low, high, scale, start, least and most of each value
    for leaf in flat_action_spaces(action_space):
        if isinstance(leaf, CHOICES):
            rows += [(0, size - 1, 1, first, first, first + size - 1) for size, first in choices_of(leaf)]
        elif isinstance(leaf, spaces.Box):
            bounds = zip(leaf.low.reshape(-1).tolist(), leaf.high.reshape(-1).tolist(), strict=True)
            rows += [(*number, *own) for own, number in zip(bounds, numbers, strict=False)]
        else:
            rows += [(0, 1, 1, 0, 0, 1)] * int(np.prod(leaf.shape or ()))
    columns = zip(("low", "high", "scale", "start", "least", "most"), zip(*rows, strict=True), strict=True)
    return {name: list(column) for name, column in columns}


def _write(network: _Network, metadata: dict[str, Any], path: Path) -> None:
    examples = network.examples(2, torch.Generator().manual_seed(0))
    tensors = tuple(torch.from_numpy(examples[name]) for name in network.inputs)
    rows = torch.export.Dim(BATCH_NAME)
    try:
        # With mkldnn an LSTM becomes an operation that ONNX lacks.
        with _quiet(), torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
            program = torch.onnx.export(
                network,
                (tensors,),
                input_names=network.inputs,
                output_names=network.outputs,
                dynamic_shapes=(tuple({0: rows} for _ in tensors),),
                verbose=False,
            )
    except Exception as error:  # from torch's tracer, the exporter, or a model of the user
        cause = error.__cause__ or error
        raise ExportError(
            f"the model cannot be exported: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        ) from error
    assert program is not None
    graph = program.model.graph
    shown = {*graph.inputs, *graph.outputs}  # names that stay; others get a prefix, so no key can collide
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        if value not in shown:
            value.name = f"/{value.name}"
    program.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
    program.save(path, external_data=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, log.disabled = log.disabled, True
        try:
            yield
        finally:
            log.disabled = before


def _check(network: _Network, model: ActingNetwork, path: Path) -> float:
    """Return the largest difference of file and model on random observations (ExportError: too large)."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    generator, states = torch.Generator().manual_seed(1), Values()
    worst, others = 0.0, 0
    for _ in range(CHECKED_STEPS):
        inputs = network.examples(CHECKED_ROWS, generator) | states
        found = dict(zip(network.outputs, session.run(None, inputs), strict=True))
        obs, first, state = network.arguments({name: torch.from_numpy(inputs[name]) for name in network.inputs})
        with torch.inference_mode():
            outputs = network.outputs_of(obs, *model.act(obs, first, state))
        expected = {name: value.numpy() for name, value in zip(network.outputs, outputs, strict=True)}
        others += int((found[ACTION] != expected[ACTION])[:, ~network.is_real].any(axis=1).sum())
        for values in (found, expected):
            values[ACTION] = values[ACTION][:, network.is_real]
        for name, value in expected.items():
            difference = np.abs(found[name] - value) / (1 + np.abs(value))
            worst = float(np.max([worst, difference.max(initial=0.0)]))  # NaN stays, and is refused below
        if network.has_memory:
            states = {"rnn_state": expected[NEXT_STATE]}
    if not worst <= TOLERANCE:
        raise ExportError(f"the exported model differs from the policy by {worst:.2g}: nothing is written")
    if others > MOST_OTHER_ACTIONS * CHECKED_ROWS * CHECKED_STEPS:
        raise ExportError(f"the exported model takes {others} other actions than the policy: nothing is written")
    return worst
