"""Published returns by trial of benchmarks/scores/trials.py, each with its source.

Every source is a public page or file. The figures come from other versions, machines and rules. A deviation is over
seeds where a source has several seeds, else over episodes.
"""

from typing import NamedTuple

GITHUB = "https://github.com"
ZOO = f"{GITHUB}/DLR-RM/rl-baselines3-zoo/blob/0088472b8cb622732bdbc4aa3d0d0abde86c67ed/benchmark.md"
CLEANRL = f"{GITHUB}/vwxyzjn/cleanrl/blob/7a96de22014e13dfb0dbf35b17157a1d9d9c7431/docs/rl-algorithms/ppo.md"
SAMPLE_FACTORY = (
    f"{GITHUB}/alex-petrenko/sample-factory/blob/248b69d037154f731e2ecc26fa3b27eaab92a888"
    "/docs/09-environment-integrations/mujoco.md"
)
GYMNASIUM = f"{GITHUB}/Farama-Foundation/Gymnasium/blob/main/gymnasium/envs/__init__.py"
HUB = "https://huggingface.co"
M = 1_000_000


class Published(NamedTuple):
    """A published figure.

    Attributes:
        who: publisher and subject.
        source: address.
        measured_on: version of the environment, if different, and other differences.
        mean, deviation: statistics of the returns.
        env_steps: frames, as in our tables; None: not published.
        of: numbers of seeds and episodes.
    """

    who: str
    source: str
    measured_on: str
    mean: float
    deviation: float | None
    env_steps: int | None
    of: str


def _zoo(measured_on: str, mean: float, deviation: float, env_steps: int, episodes: int) -> Published:
    """PPO of Stable-Baselines3 with tuned hyperparameters; actions are the most probable actions except in Atari."""
    of = f"1 seed, {episodes:,} episodes"
    return Published("RL Zoo, PPO", ZOO, measured_on, mean, deviation, env_steps, of)


def _cleanrl(measured_on: str, mean: float, deviation: float, env_steps: int) -> Published:
    """Episodes at the end of training; steps are the scripts' defaults, seeds come from benchmark/ppo.sh."""
    return Published("CleanRL, PPO", CLEANRL, measured_on, mean, deviation, env_steps, "3 seeds, while training")


def _sample_factory(measured_on: str, mean: float, deviation: float) -> Published:
    """The best model of ten seeds."""
    of = "best of 10 seeds, 10 episodes"
    return Published("Sample Factory 2, APPO", SAMPLE_FACTORY, measured_on, mean, deviation, 10 * M, of)


def _doom(name: str, measured_on: str, mean: float, deviation: float) -> Published:
    """The first of three models of one author."""
    source = f"{HUB}/edbeeching/{name}"
    return Published("Sample Factory 2, APPO", source, measured_on, mean, deviation, None, "1 seed")


def _threshold(value: float) -> Published:
    """`reward_threshold` of the registration: the mean return that solves the environment."""
    return Published("solved from", GYMNASIUM, "", value, None, None, "gymnasium's registry")


PUBLISHED: dict[str, tuple[Published, ...]] = {
    "cartpole": (
        _zoo("", 500.0, 0.0, 100_000, 300),
        _cleanrl("", 490.04, 6.12, 500_000),
        _threshold(475.0),
    ),
    "acrobot": (
        _zoo("", -73.506, 18.201, M, 2013),
        _cleanrl("", -86.36, 1.32, 500_000),
        _threshold(-100.0),
    ),
    "mountain_car_continuous": (_zoo("", 88.343, 2.572, 20_000, 633), _threshold(90.0)),
    "pendulum": (_zoo("", -172.225, 104.159, 100_000, 750),),
    "lunar_lander": (_zoo("v2", 242.119, 31.823, M, 369), _threshold(200.0)),
    "lunar_lander_continuous": (_zoo("v2", 270.863, 32.072, M, 526), _threshold(200.0)),
    "bipedal_walker": (_zoo("", 213.299, 129.490, 5 * M, 233), _threshold(300.0)),
    "half_cheetah": (
        _zoo("v3", 5819.099, 663.530, M, 150),
        _sample_factory("v4", 6262.56, 67.29),
        _threshold(4800.0),
    ),
    "hopper": (
        _zoo("v3", 2410.435, 10.026, M, 150),
        _sample_factory("v4", 2793.44, 642.58),
        _threshold(3800.0),
    ),
    "walker2d": (_zoo("v3", 3478.798, 821.708, M, 171), _sample_factory("v4", 5487.74, 48.96)),
    "frozen_lake": (_threshold(0.7),),
    "reacher": (_threshold(-3.75),),
    "inverted_pendulum": (_threshold(950.0),),
    "inverted_double_pendulum": (_sample_factory("v4", 9350.13, 1.31), _threshold(9100.0)),
    "minigrid_empty_5x5": (
        Published(
            "the shortest path", "https://minigrid.farama.org/environments/minigrid/EmptyEnv/",
            "5 steps of 100", 1 - 0.9 * 5 / 100, None, None, "the formula of the reward",
        ),
    ),
    "minigrid_empty": (
        Published(
            "the shortest path", "https://minigrid.farama.org/environments/minigrid/EmptyEnv/",
            "11 steps of 256", 1 - 0.9 * 11 / 256, None, None, "the formula of the reward",
        ),
    ),
    "minigrid_door_key": (
        Published(
            "RL Zoo, PPO", f"{HUB}/sb3/ppo-MiniGrid-DoorKey-5x5-v0", "", 0.97, 0.01, 100_000, "1 seed",
        ),
    ),
    "vizdoom_basic": (_doom("doom_basic_1111", "basic.cfg; rewards there are a hundredth of these", 75.0, 10.0),),
    "vizdoom_defend_center": (_doom("doom_defend_the_center_1111", "defend_the_center.cfg", 24.67, 0.47),),
    "pong": (
        _zoo("PongNoFrameskip-v4", 20.989, 0.105, 40 * M, 90),
        _cleanrl("PongNoFrameskip-v4", 20.36, 0.20, 40 * M),
    ),
    "breakout": (
        _zoo("BreakoutNoFrameskip-v4", 398.033, 33.328, 40 * M, 60),
        _cleanrl("BreakoutNoFrameskip-v4", 414.66, 28.09, 40 * M),
    ),
}  # fmt: skip
