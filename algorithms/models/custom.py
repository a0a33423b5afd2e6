"""Networks named by `--encoder_custom`, and their trial before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActingNetwork, ActorCritic
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.cores import Core
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.checks import require_shape
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import UsageError, text_of
from appo.utils.user_modules import import_user_module

# What a trial takes: steps before the trajectory, so that it starts from a state that is
# not zero, the trajectory and its segments, rows, and the largest relative difference of act and unroll.
TRIAL_WARM_UP, TRIAL_STEPS, TRIAL_RECURRENCE, TRIAL_ROWS, TRIAL_TOLERANCE = 2, 4, 2, 2, 1e-4

MODE_ROWS = 16
"""Rows of the trajectory in both modes: enough to detect dropout of one number in a hundred."""

Outputs = tuple[Tensor, ...]


def custom_kind(target: object) -> str:
    """Return the kind of a class: a "model" has act and unroll, a "core" step and unroll, an "encoder" neither."""
    for kind, method in (("model", "act"), ("core", "step")):
        if hasattr(target, method) and hasattr(target, "unroll"):
            return kind
    return "encoder"


def custom_class(config: ModelConfig, kind: str) -> Callable[..., Any] | None:
    """Return the class of `--encoder_custom`; None without a class, or for another kind."""
    if not config.encoder_custom:
        return None
    module_name, _, class_name = config.encoder_custom.partition(":")
    if not module_name or not class_name:
        raise UsageError(f"--encoder_custom={config.encoder_custom} must read package.module:Class")
    with _blaming(config):
        target: Callable[..., Any] = getattr(import_user_module(module_name), class_name)
    return target if custom_kind(target) == kind else None


@contextmanager
def _blaming(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        text = f"{type(error).__name__}: {text_of(error)}"
        raise UsageError(f"--encoder_custom={config.encoder_custom} failed: {text}") from error


def custom_encoder(
    make: Callable[..., Any], config: ModelConfig, observations: dict[str, ObservationSpec]
) -> nn.Module:
    """Make the user's class(observations, config): an nn.Module with `output_size`.

    The module maps scaled float32 observations {key} [N,*] to [N,output_size].
    """
    with _blaming(config):
        encoder = _float_module(make(observations, config))
        with _acting(encoder):
            inputs = {key: torch.zeros(TRIAL_ROWS, *spec.shape) for key, spec in observations.items()}
            with torch.enable_grad():
                output = encoder(inputs)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise TypeError("its output is no tensor of floats")
        require_shape("its output for two rows", output, (TRIAL_ROWS, size_of(encoder, "output_size")))
        if any(one.requires_grad for one in encoder.parameters()) and not output.requires_grad:
            raise ValueError("its output has no gradient, so nothing can be learned through it")
    return encoder


def custom_core(make: Callable[..., Any], config: ModelConfig, input_size: int) -> Core:
    """Make the user's class(input_size, config): an nn.Module with the contract of `Core`."""
    with _blaming(config):
        core: Any = _float_module(make(input_size, config))
        output_size, state_size = size_of(core, "output_size"), size_of(core, "state_size")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TRIAL_WARM_UP + TRIAL_STEPS + 1, TRIAL_ROWS, input_size, generator=generator)

        def step(t: int, first: Tensor, state: Tensor) -> tuple[Outputs, Tensor]:
            y, after = core.step(x[t], first, state)
            _require("output of step", y, TRIAL_ROWS, output_size)
            _require("state after a step", after, TRIAL_ROWS, state_size)
            return (y,), after

        def unroll(first: Tensor, state: Tensor) -> Outputs:
            y = core.unroll(x[TRIAL_WARM_UP:].clone().requires_grad_(), first, state)
            _require("output of unroll", y, TRIAL_STEPS + 1, TRIAL_ROWS, output_size)
            return (y,)

        with _acting(core):
            _require_agreement(("output",), state_size, step, unroll)
    return core  # type: ignore[no-any-return]  # its contract has been checked


def custom_model(make: Callable[..., Any], config: ModelConfig, env_spec: EnvSpec) -> ActorCritic:
    """Make the user's class(env_spec, config): an `ActorCritic`, which says what it must implement."""
    with _blaming(config):
        model = make(env_spec, config)
        if not isinstance(model, ActorCritic):
            raise TypeError(f"a {type(model).__name__} acts and unrolls but is no {ActorCritic.__module__}.ActorCritic")
        _float_module(model)
        with _acting(model):
            _try_model(model, env_spec)
    return model


def _try_model(model: ActorCritic, env_spec: EnvSpec) -> None:
    num_logits, state_size = env_spec.action.num_logits, size_of(model, "rnn_state_size")
    generator, lead = torch.Generator().manual_seed(0), (TRIAL_WARM_UP + TRIAL_STEPS + 1, TRIAL_ROWS)
    obs = _random_observations(env_spec, lead, generator)

    def step(t: int, first: Tensor, state: Tensor) -> tuple[Outputs, Tensor]:
        logits, value, after = model.act({key: x[t] for key, x in obs.items()}, first, state)
        _require("logits of act", logits, TRIAL_ROWS, num_logits)
        _require("value of act", value, TRIAL_ROWS)
        _require("state after act", after, TRIAL_ROWS, state_size)
        return (logits, value), after

    def unroll(first: Tensor, state: Tensor) -> Outputs:
        logits, value = model.unroll({key: x[TRIAL_WARM_UP:] for key, x in obs.items()}, first, state, TRIAL_RECURRENCE)
        _require("logits of unroll", logits, TRIAL_STEPS, TRIAL_ROWS, num_logits)
        _require("value of unroll", value, TRIAL_STEPS + 1, TRIAL_ROWS)
        return logits, value

    _require_agreement(("logits", "value"), state_size, step, unroll)
    _require_values_in_any_unit(
        model, lambda: step(0, torch.ones(TRIAL_ROWS).bool(), torch.zeros(TRIAL_ROWS, state_size))
    )


def _require_values_in_any_unit(model: ActorCritic, act: Callable[[], tuple[Outputs, Tensor]]) -> None:
    """Raise ValueError unless the model's `value_layer` produces its values."""
    values, layer = [], [x.clone() for x in model.value_layer()]
    for mean, std in ((3.0, 2.0), (0.0, 1.0)):
        model.set_return_statistics(mean, std)
        (_, value), _ = act()
        values.append(model.denormalize_value(value))
    for now, before in zip(model.value_layer(), layer, strict=True):
        now.copy_(before)  # to the last bit
    if not _difference(*values) <= TRIAL_TOLERANCE:
        raise ValueError("its values do not come from its value_head alone")


def _require_agreement(
    names: tuple[str, ...],
    state_size: int,
    step: Callable[[int, Tensor, Tensor], tuple[Outputs, Tensor]],
    unroll: Callable[[Tensor, Tensor], Outputs],
) -> None:
    """Raise ValueError unless unrolling repeats stepping, resets included, and is differentiable."""
    first = torch.zeros(TRIAL_WARM_UP + TRIAL_STEPS + 1, TRIAL_ROWS, dtype=torch.bool)
    first[0] = first[TRIAL_WARM_UP + 1, 0] = first[-1, 1] = True  # also within a segment and at the last observation
    state, states, outputs = torch.zeros(TRIAL_ROWS, state_size), [], []
    for t, starts in enumerate(first):
        states.append(state)
        output, state = step(t, starts, state)
        outputs.append(output)
    again, after = step(0, first[0], state)  # the first step once more, now with a past
    pairs = zip((*again, after), (*outputs[0], states[1]), strict=True)
    if not all(_difference(y, fresh) <= TRIAL_TOLERANCE for y, fresh in pairs):
        raise ValueError("its state does not count as zero where an episode starts")
    with torch.enable_grad():
        unrolled = unroll(first[TRIAL_WARM_UP:], torch.stack(states[TRIAL_WARM_UP:-1:TRIAL_RECURRENCE]))
    for name, got, column in zip(names, unrolled, zip(*outputs, strict=True), strict=True):
        difference = _difference(got, torch.stack(column[TRIAL_WARM_UP:])[: len(got)])
        if not difference <= TRIAL_TOLERANCE:  # also where it is NaN
            raise ValueError(f"its {name} of unroll differs by {difference:.1g} from that of single steps")
        if not got.requires_grad:
            raise ValueError(f"its {name} of unroll has no gradient, so nothing can be learned through it")


def _difference(x: Tensor, expected: Tensor) -> float:
    difference = (x.detach() - expected).abs() / (1 + expected.abs())
    return float(difference.max()) if difference.numel() else 0.0


NORMS = "its statistics of batches: GroupNorm and LayerNorm have none"
NOISE = "what it leaves out by chance: leave it out, or set its probability to 0"


def refuse_two_behaviours(model: nn.Module, config: ModelConfig, env_spec: EnvSpec) -> None:
    """Refuse a custom network that computes something else in training mode.

    Training compares the network with the acting one: with dropout, probabilities of actions differ by chance; with
    statistics of batches, by the rest of the batch.

    Raises:
        UsageError: the first such layer, or the size of the difference.
    """
    blame = f"--encoder_custom={config.encoder_custom}"
    for name, module in model.named_modules():
        if reason := _two_behaviours(module):
            where = f"its {name.rpartition('.')[2]} ({type(module).__name__})"
            raise UsageError(f"{blame}: {where} learns otherwise than it acts, by {reason}")
    if not isinstance(model, ActorCritic):
        return
    with _blaming(config):
        acting, learning = _in_both_modes(model, env_spec)
    difference = max(_difference(y, expected) for y, expected in zip(learning, acting, strict=True))
    if not difference <= TRIAL_TOLERANCE:
        raise UsageError(
            f"{blame}: what it computes in train() differs by {difference:.1g} from that in eval(), so it would learn"
            " from what has not acted; leave out dropout and whatever else looks at self.training"
        )


def refuse_hidden_inputs(
    flat: FlatModule, make: Callable[[], FlatModule], config: ModelConfig, env_spec: EnvSpec
) -> None:
    """Refuse a custom network whose outputs for a row follow from more than the row and the weights.

    Processes exchange nothing but weights, and act on other rows than the learner has.

    Args:
        flat: network of these flags.
        make: makes another one, whose weights are replaced.
        config: flags of the network.
        env_spec: spec of the environment.

    Raises:
        UsageError: tensors are neither parameters nor buffers, or a row depends on the others.
    """
    blame = f"--encoder_custom={config.encoder_custom}"
    rows = _random_observations(env_spec, (MODE_ROWS,), torch.Generator().manual_seed(0))

    def outputs_of(network: nn.Module, count: int) -> Tensor:
        assert isinstance(network, ActingNetwork)
        with _acting(network):
            obs = {key: x[:count] for key, x in rows.items()}
            first, state = torch.ones(count, dtype=torch.bool), torch.zeros(count, network.rnn_state_size)
            logits, value, _ = network.act(obs, first, state)
        return torch.cat([logits, *([] if value is None else [value[:, None]])], dim=1)

    with _blaming(config), torch.random.fork_rng(devices=[]):
        twin = make()
        twin.load(flat.flat.numpy())
        expected, again = outputs_of(flat.module, MODE_ROWS), outputs_of(twin.module, MODE_ROWS)
        alone = outputs_of(flat.module, 1)
    if not _difference(again, expected) <= TRIAL_TOLERANCE:
        raise UsageError(
            f"{blame}: it computes with tensors that are neither parameters nor buffers, so that checkpoints and other"
            " processes lack them: nn.ModuleList and register_buffer make them known"
        )
    if not _difference(alone, expected[:1]) <= TRIAL_TOLERANCE:
        raise UsageError(f"{blame}: what it computes for a row depends on the other rows of the batch")


def _two_behaviours(module: nn.Module) -> str:
    """Return the reason why a layer of torch differs in training mode; empty: no difference."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return NORMS
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return NORMS if module.track_running_stats else ""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return NOISE if module.p > 0 else ""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return NOISE if module.dropout > 0 else ""
    return NOISE if isinstance(module, nn.RReLU) else ""


def _in_both_modes(model: ActorCritic, env_spec: EnvSpec) -> tuple[Outputs, Outputs]:
    """Return the outputs for one trajectory in evaluation and in training mode; the model stays unchanged."""
    generator, was_training = torch.Generator().manual_seed(0), model.training
    obs = _random_observations(env_spec, (TRIAL_STEPS + 1, MODE_ROWS), generator)
    first = torch.zeros(TRIAL_STEPS + 1, MODE_ROWS, dtype=torch.bool)
    first[0] = True
    state = torch.zeros(1, MODE_ROWS, model.rnn_state_size)
    before = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()}
    outputs: list[Outputs] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for training in (False, True):
            model.train(training)
            for module in model.modules():
                if _normalizes_spectrally(module):
                    module.eval()  # an estimate that advances, which converges
            outputs.append(tuple(y.clone() for y in model.unroll(obs, first, state, TRIAL_STEPS)))
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(before[name])
    model.train(was_training)
    return outputs[0], outputs[1]


def _normalizes_spectrally(module: nn.Module) -> bool:
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    return type(module).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks


def _random_observations(env_spec: EnvSpec, lead: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return observations of zeros and ones, which are valid in nearly every space, also as indices of a table."""
    return {
        key: torch.randint(0, 2, (*lead, *spec.shape), generator=generator).to(getattr(torch, spec.dtype))
        for key, spec in env_spec.observations.items()
    }


def _float_module(made: object) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(f"a {type(made).__name__} is no torch.nn.Module")
    for name, module in made.named_modules():  # it counts batches in integers, which says nothing to people
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise TypeError(f"its {name} ({type(module).__name__}) learns otherwise than it acts, by {NORMS}")
    for name, tensor in chain(made.named_parameters(), made.named_buffers()):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is of {tensor.dtype}; all parameters and buffers must be of torch.float32")
    return made


@contextmanager
def _acting(module: nn.Module) -> Iterator[None]:
    """Run a module as a policy worker does: no gradients, no changed statistics."""
    was_training = module.training
    module.eval()
    with torch.no_grad():
        yield
    module.train(was_training)


def size_of(module: Any, name: str) -> int:
    """Return a size stated as an attribute of a module (TypeError: not an int)."""
    size = getattr(module, name)
    if not isinstance(size, int):
        raise TypeError(f"its {name} is a {type(size).__name__}, not an int")
    return size


def _require(name: str, tensor: object, *shape: int) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        raise TypeError(f"its {name} is no tensor of torch.float32")
    require_shape(f"its {name}", tensor, shape)
