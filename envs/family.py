"""Facts of a family of environments: messages, presets, a table of the documentation and tests follow from the facts.

The modules of `envs/families` declare the facts. Every start reads all of them, so neither gymnasium nor numpy is
imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from appo.envs.config import EnvConfig

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    AnyEnv = gymnasium.Env[Any, Any]
    Registration = EnvSpec
else:
    AnyEnv = Registration = Any

Preset = dict[str, object]
"""Flag -> value."""

MLP: Preset = {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}
GAUSSIAN_MLP: Preset = MLP | {"adaptive_stddev": False}

SHARED_LEARNING: Preset = {
    "ppo_clip_ratio": 0.2, "vtrace_lambda": 0.95, "max_grad_norm": 0.5, "exploration_loss_coeff": 0.01
}  # fmt: skip
"""Flags of learning that most families share."""

Harmless = Mapping[str, float | str]
"""Argument of an environment that an untrusted run may set -> bound of its absolute value, or regular expression of the
allowed words. Arguments that are not listed may name a program, a file or a module, or take all memory."""

WEIGHT, MANY_STEPS, PIXELS = 1e9, 1e7, 1024.0
"""Bounds that many arguments share."""


def importing(module: str) -> Callable[[], object]:
    """Return a function that imports a module."""
    return partial(import_module, module)


@dataclass(frozen=True)
class FamilyPreset:
    """Flags for the environments of a family.

    Attributes:
        ids: regular expression that the beginning of an id matches.
        network: flags of environment and network.
        network_on_cpu: flags that replace flags of `network` if the network is trained on a CPU.
        learning: flags of APPO; every other algorithm keeps its own in its `presets.py`.
        learning_on_cpu: flags that replace flags of `learning` if the network is trained on a CPU.
        discount: `--gamma` of APPO, PPO and learning from datasets; None: the default of the flag.
    """

    ids: str
    network: Preset = field(default_factory=dict)
    network_on_cpu: Preset = field(default_factory=dict)
    learning: Preset = field(default_factory=dict)
    learning_on_cpu: Preset = field(default_factory=dict)
    discount: float | None = None


@dataclass(frozen=True)
class Family:
    """Environments of one optional package.

    Attributes:
        name: name in messages and tables.
        package: Python package that must be installed.
        extra: extra of `setup.py` that installs the package: `pip install "appo[EXTRA]"`.
        examples: ids for the documentation and the tests; the tests train in the first.
        treatment: what the adapter changes, for docs/environments.md.
        ids: regular expression that the beginning of an id matches if the id needs the package; None: ids do not tell.
        claims_ids: whether the adapter makes every environment with such an id. If the ids are words that other
            packages use too, the adapter makes only environments with a matching entry point.
        entry_points: regular expression for entry points, as `ids`, for ids that gymnasium or the user registered;
            None: entry points do not tell.
        register: function that imports the module which registers the ids; None: nothing to import.
        flags: flags of `EnvConfig` that only this family understands.
        harmless: arguments that can neither run, read nor write anything, nor exhaust memory.
        prefixes: prefixes of ids before the name that people know.
        names: regular expression of the names in lower case, without prefix and version. Messages about a missing
            package read the names; empty: none are known.
        preset: flags with which the environments are trained; None: single environments have presets, or none has.
    """

    name: str
    package: str
    extra: str
    examples: tuple[str, ...]
    treatment: str = "unchanged"
    ids: str | None = None
    claims_ids: bool = True
    entry_points: str | None = None
    register: Callable[[], object] | None = None
    flags: tuple[str, ...] = ()
    harmless: Harmless = field(default_factory=dict, compare=False)
    prefixes: tuple[str, ...] = ()
    names: str = ""
    preset: FamilyPreset | None = field(default=None, compare=False)

    @property
    def command(self) -> str:
        """Return the command that installs the package."""
        return f'pip install "appo[{self.extra}]"'

    def has_id(self, text: str) -> bool:
        """Return whether a text begins like an id of the family."""
        return self.ids is not None and re.match(self.ids, text) is not None

    def has_entry_point(self, text: str) -> bool:
        """Return whether a text begins like an entry point of the family."""
        return self.entry_points is not None and re.match(self.entry_points, text) is not None

    def is_adapted(self, env_id: str, entry_point: str) -> bool:
        """Return whether the family's adapter, if the family has an adapter, makes a registered environment."""
        return any(self.has_entry_point(t) or (self.claims_ids and self.has_id(t)) for t in (env_id, entry_point))


@runtime_checkable
class Adapter(Protocol):
    """Module of `envs.families` that makes the environments of its family; without `make_single` gymnasium does."""

    FAMILY: Family

    def make_single(self, registration: Registration, config: EnvConfig, arguments: dict[str, Any]) -> AnyEnv:
        """Make one environment; `arguments` are the arguments of --env_kwargs and of rendering."""
        ...


@runtime_checkable
class VectorAdapter(Adapter, Protocol):
    """Module of a family that has vector entry points."""

    def vector_arguments(self, config: EnvConfig, registration: Registration) -> dict[str, Any]:
        """Return the arguments of the vector entry point that follow from the flags."""
        ...
