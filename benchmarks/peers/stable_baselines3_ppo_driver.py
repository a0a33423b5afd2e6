"""PPO of Stable-Baselines3 with the tuned hyperparameters of rl-baselines3-zoo; runs with an interpreter of its own.

    stable_baselines3_ppo_driver.py ENV FOLDER --seed=N

It prints the agent steps taken and the mean return of the last 100 episodes; after the steps of the zoo it waits to be
ended. FOLDER is not used.
"""

import argparse
import json
import os
import signal
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

EPISODES, REPORT_SECONDS = 100, 0.5
# hyperparams/ppo.yml: number of environments, normalization, steps of the schedules, arguments of PPO
ZOO = {
    "CartPole-v1": (
        8,
        False,
        100_000,
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0},
    ),
    "LunarLander-v3": (
        16,
        False,
        1_000_000,
        {"n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01},
    ),
    "HalfCheetah-v5": (
        1,
        True,
        1_000_000,
        {
            "n_steps": 512,
            "batch_size": 64,
            "gae_lambda": 0.92,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.000401762,
            "learning_rate": 2.0633e-05,
            "clip_range": 0.1,
            "max_grad_norm": 0.8,
            "vf_coef": 0.58096,
            "policy_kwargs": {
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": torch.nn.ReLU,
                "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            },
        },
    ),
}
LINEAR = {"CartPole-v1": {"learning_rate": lambda left: left * 1e-3, "clip_range": lambda left: left * 0.2}}


class Report(BaseCallback):
    """Prints the progress."""

    def _on_training_start(self):
        self.due = 0.0

    def _on_step(self):
        now = time.monotonic()
        if now >= self.due:
            self.due = now + REPORT_SECONDS
            found = [episode["r"] for episode in self.model.ep_info_buffer]
            mean = sum(found) / len(found) if len(found) >= EPISODES else None
            print(json.dumps({"seconds": now, "samples": self.num_timesteps, "return": mean}), flush=True)
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("env", choices=ZOO)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("PEER_THREADS", "1")))
    number, is_normalized, steps, flags = ZOO[given.env]
    envs = make_vec_env(given.env, number, seed=given.seed)
    if is_normalized:
        envs = VecNormalize(envs, gamma=flags["gamma"])
    more = LINEAR.get(given.env, {})
    model = PPO("MlpPolicy", envs, seed=given.seed, device="cpu", **flags, **more)
    model.learn(steps, callback=Report())
    print(json.dumps({"samples": model.num_timesteps, "return": None, "ended": True}), flush=True)
    signal.pause()  # the reader of the output ends this process


if __name__ == "__main__":
    main()
