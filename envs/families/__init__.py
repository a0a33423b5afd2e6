"""Families are environments that live in optional packages; every module of this folder is the adapter of one.

To add a family, write its adapter into this folder, where it is found (`highway.py` is a short one to copy from), an
extra into `setup.py` and a version into `constraints.txt`. The adapter declares its `FAMILY` and has a function
`make_single`, and `vector_arguments` if there is a native vector (`Adapter` and `VectorAdapter` in `envs/make.py`).
All adapters are imported at every start, to read their families: they import the optional package inside functions.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Harmless = Mapping[str, float | str]
"""Argument of an environment that a run of a stranger may set -> its largest size as a number, or a regular expression
of the words it may be. What is not listed may name a program, a file or a module, or take all memory."""


@dataclass(frozen=True)
class Family:
    """Environments of one optional package.

    Attributes:
        name: as messages and tables have it.
        package: name of the Python package that has to be there.
        extra: of `setup.py`, which installs the package: `pip install "appo[EXTRA]"`.
        ids: regular expression of how ids begin that need the package; None: none can be known by their ids.
        claims_ids: whether the adapter makes whatever has such an id, or only what has such an entry point, because
            ids are words that others use too.
        entry_points: regular expression of how entry points begin that need the package, for ids that gymnasium or the
            user registered; None: none can be known by their entry points.
        register: imports what registers the ids with gymnasium; None if nothing has to be imported.
        flags: of `EnvConfig`, which only this family understands.
        harmless: arguments that can neither run, read nor write anything, nor ask for more memory than there is.
        prefixes: with which ids begin, before the name that people know.
        names: regular expression of those names in lower case, without version, by which the family is told where the
            package is not installed; empty: none are known.
    """

    name: str
    package: str
    extra: str
    ids: str | None = None
    claims_ids: bool = True
    entry_points: str | None = None
    register: Callable[[], object] | None = None
    flags: tuple[str, ...] = ()
    harmless: Harmless = field(default_factory=dict, compare=False)
    prefixes: tuple[str, ...] = ()
    names: str = ""

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
        """Return whether the family's adapter, if it has one, makes a registered environment."""
        texts = (env_id, entry_point)
        return any(self.has_entry_point(text) or (self.claims_ids and self.has_id(text)) for text in texts)


WEIGHT, MANY_STEPS, PIXELS = 1e9, 1e7, 1024.0
LONGEST_LIST = 64

OF_ALL: Harmless = {"max_episode_steps": MANY_STEPS, "disable_env_checker": 1, "render_mode": r"rgb_array"}
"""Arguments of gymnasium itself."""

OF_MUJOCO: Harmless = {
    **dict.fromkeys(
        (
            "forward_reward_weight", "ctrl_cost_weight", "contact_cost_weight", "healthy_reward", "reset_noise_scale",
            "healthy_z_range", "healthy_state_range", "healthy_angle_range", "contact_force_range",
            "contact_cost_range", "uph_cost_weight", "impact_cost_weight", "impact_cost_range", "reward_near_weight",
            "reward_dist_weight", "reward_control_weight",
        ),
        WEIGHT,
    ),
    **dict.fromkeys(
        (
            "terminate_when_unhealthy", "exclude_current_positions_from_observation",
            "include_cfrc_ext_in_observation", "include_cinert_in_observation", "include_cvel_in_observation",
            "include_qfrc_actuator_in_observation",
        ),
        1.0,
    ),
    "frame_skip": 100,
    "width": PIXELS,
    "height": PIXELS,
}  # fmt: skip

OF_BOX2D: Harmless = {
    **dict.fromkeys(("continuous", "hardcore", "enable_wind", "domain_randomize", "verbose"), 1.0),
    **dict.fromkeys(("gravity", "wind_power", "turbulence_power", "lap_complete_percent"), 100.0),
}

WITHOUT_ADAPTER = (
    Family("MuJoCo", "mujoco", "mujoco", entry_points=r"gymnasium\.envs\.mujoco", harmless=OF_MUJOCO),
    Family("Box2D", "Box2D", "box2d", entry_points=r"gymnasium\.envs\.box2d", harmless=OF_BOX2D),
)
"""Families that are made as gymnasium makes them."""

ALWAYS_THERE: Mapping[str, Harmless] = {
    r"gymnasium\.envs\.classic_control": {"sutton_barto_reward": 1, "goal_velocity": 10, "g": 1000},
    r"gymnasium\.envs\.toy_text": {
        **dict.fromkeys(("natural", "sab", "is_slippery", "is_rainy", "fickle_passenger", "success_rate"), 1.0),
        "map_name": r"4x4|8x8",
        "reward_schedule": WEIGHT,
    },
    r"envs\.toys\.": {
        **dict.fromkeys(("delay", "num_cues", "length", "num_axes", "num_agents", "num_rounds"), 1e4),
        **dict.fromkeys(("max_steps", "num_steps", "episode_steps", "obs_bytes"), MANY_STEPS),
        **dict.fromkeys(("observation", "action", "mask"), r"\w{0,40}"),
        "autoreset_mode": r"NextStep|SameStep",
    },
}
"""Harmless arguments of environments that need no further package, by how their entry points begin."""


def adapter_names() -> list[str]:
    """Find the dotted names of all adapters."""
    return [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]


def is_harmless(harmless: Harmless, name: str, value: object) -> bool:
    """Return whether an argument of an environment may be a stranger's: it is listed, and within its bounds."""
    limit = harmless.get(name)
    if limit is None:
        return False
    if isinstance(value, list):
        return len(value) <= LONGEST_LIST and all(
            not isinstance(part, list) and is_harmless(harmless, name, part) for part in value
        )
    if isinstance(limit, str):
        return isinstance(value, str) and re.fullmatch(limit, value) is not None
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= limit)
