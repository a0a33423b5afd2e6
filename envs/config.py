"""The flags of the environment."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from appo.envs import given
from appo.utils.errors import UsageError
from appo.utils.flags import flag


@dataclass(frozen=True)
class EnvConfig:
    """Environment."""

    env: str = flag(
        "",
        "environment id of gymnasium or PettingZoo, or package.module:Id for one of your own (required for a new run,"
        " unless it learns from datasets)",
        fixed_on_resume=True,
    )
    env_kwargs: dict[str, object] = flag(
        {},
        "keyword arguments of the environment as key=value words or one JSON object",
        fixed_on_resume=True,
        needs="env",
    )
    env_frameskip: int | None = flag(
        None,
        "env frames per action, every frame counted as an env step; none = the environment's own",
        minimum=1,
        maximum=1000,
        fixed_on_resume=True,
        needs="env",
    )
    env_framestack: int | None = flag(
        None,
        "consecutive observations stacked into one; none = the environment's own",
        minimum=1,
        maximum=1000,
        fixed_on_resume=True,
        needs="env",
    )
    horizon: int | None = flag(
        None,
        "env steps of the agent after which an episode is truncated; none = as the environment says",
        minimum=1,
        fixed_on_resume=True,
        needs="env",
    )
    soft_horizon: bool = flag(
        False,
        "let an episode of training that reaches --horizon end in the statistics alone: the env is not reset, memory"
        " and values go on; enjoy and evaluate truncate there as ever",
        needs="actors",
    )
    no_done_at_end: bool = flag(
        False,
        "store an episode that terminates as one that is truncated: the value of its last observation is bootstrapped",
        needs="actors",
    )
    episodic_life: bool = flag(
        False,
        "store a step that costs a life as the end of an episode, for learning alone: the game, its statistics and"
        " evaluations go on; the infos of the env must hold lives, as those of Atari do",
        needs="actors alone",
    )
    observe_previous: str = flag(
        "none",
        "what of the last step is observed too, as further numbers of a vector of floats or as previous_step beside all"
        " else, zeros where an episode begins: its action (choices as one-hot), its reward as the env gave it, or both;"
        " one agent, in the Python loop",
        choices=("none", "action", "reward", "both"),
        fixed_on_resume=True,
        needs="env",
    )
    clip_actions: bool = flag(
        True,
        "clip numbers to the bounds of the action space before the env gets them; off = the env gets what was sampled,"
        " as if it had no bounds",
        fixed_on_resume=True,
        needs="numbers",
    )
    res_w: int | None = flag(None, "width of VizDoom's images in pixels; none = 128", minimum=1, fixed_on_resume=True)
    res_h: int | None = flag(None, "height of VizDoom's images in pixels; none = 72", minimum=1, fixed_on_resume=True)
    action_scaling: str = flag(
        "auto",
        "units in which a policy acts: auto = [-1, 1] stands for two finite bounds, and -1 or 1 for a single one, which"
        " is only shifted; numbers without bounds stay as they are; off = the units of the environment",
        choices=("auto", "off"),
        fixed_on_resume=True,
        needs="bounded continuous_as_bins=None",
    )
    action_distribution: str = flag(
        "gaussian",
        "how numbers between two finite bounds are drawn: gaussian = cut at the bounds, tanh_gaussian = squashed"
        " between them (needs action_scaling=auto)",
        choices=("gaussian", "tanh_gaussian"),
        fixed_on_resume=True,
        needs="between",
    )
    continuous_as_bins: int | None = flag(
        None,
        "choices, evenly spaced from bound to bound, that stand for every number of a Box of actions; none = numbers",
        minimum=2,
        maximum=1000,
        fixed_on_resume=True,
        needs="numbers",
    )
    agent_id: str = flag(
        "auto",
        "whether agents of unlike kinds see who they are, as key agent_id beside their padded observations: auto ="
        " where their spaces differ, off = never",
        choices=("auto", "off"),
        fixed_on_resume=True,
        needs="agents",
    )
    reward_scale: float = flag(
        1.0, "factor on every reward before clipping; reported returns stay unscaled", needs="returns"
    )
    reward_clip: float = flag(0.0, "limit of the absolute scaled reward; 0 = off", minimum=0, needs="returns")
    env_vectorization: str = flag(
        "auto",
        "who steps the envs of a group: python = our loop over single envs, native = the env's own gymnasium vector"
        " entry point, auto = native where there is one",
        choices=("auto", "python", "native"),
        needs="env",
    )
    max_env_rebuilds: int = flag(
        10,
        "how often an env that raises, or returns what is not finite, is made again within 1,000 of its steps, in the"
        " Python loop; beyond that, or after three failures without a step in between, its actor fails; 0 = never",
        minimum=0,
        needs="env",
    )
    force_envs_single_thread: bool = flag(
        True, "limit native thread pools (OpenMP, BLAS) inside actors to one thread each", needs="actors processes"
    )
    decorrelate_envs_on_one_worker: bool = flag(
        True,
        "start each env of the Python loop with a different number of random steps; impossible inside a native vector"
        " env",
        needs="actors",
    )

    def __reduce__(self) -> tuple[Callable[..., "EnvConfig"], tuple[dict[str, Any], bytes | None]]:
        """Travel to another process of ours together with a given class or function."""
        return _with_given, (vars(self), given.to_bytes(self.env))

    def check(self, *, writes: bool) -> None:
        """Refuse flags that contradict each other (UsageError); `writes`: the run writes a dataset."""
        if not self.reward_scale:
            raise UsageError("--reward_scale=0 makes every reward 0, and nothing is learned")
        if self.episodic_life and writes:
            raise UsageError("--episodic_life does not go with --output: datasets hold whole games")
        if self.no_done_at_end and writes:
            raise UsageError("--no_done_at_end does not go with --output: datasets tell ends from cuts")
        if self.soft_horizon and self.horizon is None:
            raise UsageError("--soft_horizon needs --horizon, the steps after which an episode ends in the statistics")
        if self.action_distribution == "tanh_gaussian" and self.action_scaling == "off":
            raise UsageError(
                "--action_distribution=tanh_gaussian fills [-1, 1] and no more: it needs --action_scaling=auto, which"
                " maps that to the bounds"
            )
        if self.action_distribution == "tanh_gaussian" and not self.clip_actions:
            raise UsageError(
                "--action_distribution=tanh_gaussian draws numbers between two bounds: without --clip_actions=False"
            )
        if self.continuous_as_bins and (self.action_distribution == "tanh_gaussian" or not self.clip_actions):
            other = "--clip_actions=False" if not self.clip_actions else "--action_distribution=tanh_gaussian"
            raise UsageError(
                f"--continuous_as_bins={self.continuous_as_bins} has choices from bound to bound: without {other}"
            )

    @property
    def as_trained(self) -> "EnvConfig":
        """The flags with which actors make environments: actors keep a soft horizon themselves, without a reset."""
        return replace(self, horizon=None) if self.soft_horizon else self


def _with_given(flags: dict[str, Any], content: bytes | None) -> EnvConfig:
    if content is not None:
        given.take(flags["env"], content)
    return EnvConfig(**flags)
