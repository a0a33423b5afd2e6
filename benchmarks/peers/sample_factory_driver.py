"""Train with Sample Factory 2, unpatched, and print the samples trained on; runs with a separate interpreter.

    sample_factory_driver.py WORKLOAD TRAIN_DIR [FLAG ...]

A worker per core with double-buffered groups is the fastest setting on two cores, except for CartPole. Learning flags
equal `workloads.py`; all other choices keep Sample Factory's defaults. The environment skips frames: env steps are
samples.
"""

import json
import os
import sys
import time
from functools import partial

import gymnasium as gym
import numpy as np
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

EPISODES = 100  # episodes in the mean return
WORKERS = max(2, os.cpu_count() or 2)
COMMON = {
    "device": "cpu",
    "num_workers": WORKERS,
    "worker_num_splits": 2,
    "env_frameskip": 1,
    "use_record_episode_statistics": True,
    "decorrelate_experience_max_seconds": 0,
}
ONE_PASS = {"rollout": 32, "batch_size": 1024, "num_batches_per_epoch": 1, "num_epochs": 1, "num_envs_per_worker": 16}
MLP = {"encoder_mlp_layers": (64, 64), "nonlinearity": "tanh", "use_rnn": False}
PONG = {
    "encoder_conv_architecture": "convnet_atari",
    "nonlinearity": "relu",
    "use_rnn": False,
    "obs_scale": 255.0,
    "normalize_input": False,
    "max_grad_norm": 0.5,
    "exploration_loss_coeff": 0.01,
}
FLAGS = {
    "pong": PONG | ONE_PASS,
    "pong_4_epochs": PONG | ONE_PASS | {"batch_size": 256, "num_batches_per_epoch": 4, "num_epochs": 4},
    "vizdoom": ONE_PASS | {"batch_size": 2048, "obs_scale": 255.0, "normalize_input": False, "rnn_size": 512},
    "cartpole": MLP | ONE_PASS | {"num_workers": 1, "num_envs_per_worker": 32},
    "cartpole_learning": MLP
    | {
        "rollout": 32,
        "batch_size": 512,
        "num_batches_per_epoch": 1,
        "num_epochs": 2,
        "num_envs_per_worker": 8,
        "learning_rate": 1e-3,
    },
    # as in its published settings for MuJoCo, with a discount for long episodes
    "lunar_lander": MLP
    | {
        "rollout": 64,
        "batch_size": 1024,
        "num_batches_per_epoch": 4,
        "num_epochs": 2,
        "num_envs_per_worker": 8,
        "gamma": 0.999,
        "learning_rate": 1e-3,
        "ppo_clip_ratio": 0.2,
        "exploration_loss_coeff": 0.01,
    },
    "pong_learning": PONG | ONE_PASS | {"batch_size": 256, "num_batches_per_epoch": 4, "learning_rate": 5e-4},
    # published settings for MuJoCo, except the schedule of the learning rate, which the command line refuses
    "halfcheetah": MLP
    | {
        "rollout": 64,
        "batch_size": 1024,
        "num_batches_per_epoch": 4,
        "num_epochs": 2,
        "num_envs_per_worker": 8,
        "adaptive_stddev": False,
        "policy_initialization": "torch_default",
        "learning_rate": 0.00295,
        "kl_loss_coeff": 0.1,
        "ppo_clip_ratio": 0.2,
        "value_loss_coeff": 1.3,
        "exploration_loss_coeff": 0.0,
        "max_grad_norm": 3.5,
        "value_bootstrap": True,
    },
}


class SignReward(gym.RewardWrapper):
    def reward(self, reward):
        return float(np.sign(reward))


class Arrays(gym.ObservationWrapper):
    """Plain arrays in place of lazily stacked frames."""

    def observation(self, observation):
        return np.asarray(observation)


class Screen(gym.Wrapper):
    """VizDoom's screen alone, 128x72 with channels first; the last screen again at the end of an episode."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (3, 72, 128), np.uint8)
        self.last = np.zeros(self.observation_space.shape, np.uint8)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return self.shown(observation), info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            self.shown(observation)
        return self.last, float(reward), terminated, truncated, info

    def shown(self, observation):
        import cv2

        image = cv2.resize(observation["screen"], (128, 72), interpolation=cv2.INTER_LINEAR)
        self.last = np.ascontiguousarray(image.transpose(2, 0, 1))
        return self.last


def make_pong(_name, _cfg, _env_config, render_mode=None):
    from ale_py.registration import register_v5_envs

    if "ALE/Pong-v5" not in gym.registry:
        register_v5_envs()
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, render_mode=render_mode)
    env = gym.wrappers.AtariPreprocessing(env)
    return SignReward(Arrays(gym.wrappers.FrameStack(env, 4)))


def make_vizdoom(_name, _cfg, _env_config, render_mode=None):
    import cv2
    import vizdoom.gymnasium_wrapper

    assert vizdoom.gymnasium_wrapper is not None  # the import registers the scenarios
    cv2.setNumThreads(1)
    env = gym.make("VizdoomBasic-v1", screen_resolution="RES_160X120", frame_skip=4, render_mode=render_mode)
    return Screen(env)


def make_plain(env_id, _name, _cfg, _env_config, render_mode=None):
    return gym.make(env_id, render_mode=render_mode)


MAKERS = {
    "pong": make_pong,
    "pong_4_epochs": make_pong,
    "pong_learning": make_pong,
    "vizdoom": make_vizdoom,
    "cartpole": partial(make_plain, "CartPole-v1"),
    "cartpole_learning": partial(make_plain, "CartPole-v1"),
    "lunar_lander": partial(make_plain, "LunarLander-v2"),  # v3 differs in its wind, which is off
    "halfcheetah": partial(make_plain, "HalfCheetah-v4"),  # the physics of v5; the required gymnasium lacks v5
}


def words(flags):
    """Return the command line."""
    for name, value in flags.items():
        yield from (f"--{name}", *map(str, value)) if isinstance(value, tuple) else (f"--{name}={value}",)


def report(runner, message, _policy):
    """Print the samples trained on, and the mean return of the last 100 episodes."""
    returns = runner.policy_avg_stats.get("reward", [()])[0]
    mean = float(np.mean(returns)) if len(returns) >= EPISODES else None
    samples = message[LEARNER_ENV_STEPS]
    print(json.dumps({"seconds": time.monotonic(), "samples": samples, "return": mean}), flush=True)


def main():
    workload, train_dir, *further = sys.argv[1:]
    os.chdir(train_dir)  # VizDoom writes files into the current folder
    os.makedirs("_vizdoom", exist_ok=True)  # else both workers create the folder, one dies, and training goes on
    register_env(workload, MAKERS[workload])
    flags = COMMON | FLAGS[workload] | {"env": workload, "train_dir": train_dir, "experiment": "run"}
    arguments = [*words(flags), *further]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(report)  # Sample Factory's own function replaces the list
    if runner.init() == ExperimentStatus.SUCCESS:
        runner.run()


if __name__ == "__main__":
    main()
