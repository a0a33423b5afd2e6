"""Stable-Baselines3's DQN as it comes; runs with an interpreter of its own.

    stable_baselines3_driver.py ENV --batch_size=B --uses=U --learning_starts=N --capacity=N --threads=N --envs=N

It prints how many agent steps have been taken once it trains. An update of B samples after every B / U steps uses each
step U times.
"""

import argparse
import json
import time

import gymnasium
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

REPORT_SECONDS, EPSILON = 0.5, 0.05


class Report(BaseCallback):
    """Prints the progress."""

    def _on_training_start(self):
        self.due = 0.0

    def _on_step(self):
        now = time.monotonic()
        if now >= self.due and self.model._n_updates:
            self.due = now + REPORT_SECONDS
            print(json.dumps({"seconds": now, "samples": self.num_timesteps}), flush=True)
        return True


def make(name):
    if not name.startswith("ALE/"):
        return gymnasium.make(name)
    import ale_py

    gymnasium.register_envs(ale_py)
    return AtariWrapper(gymnasium.make(name, frameskip=1, repeat_action_probability=0.0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("env")
    for flag in ("batch_size", "uses", "learning_starts", "capacity", "threads", "envs"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    images = given.env.startswith("ALE/")
    envs = DummyVecEnv([lambda: make(given.env)] * given.envs)
    more = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    steps_per_update = given.batch_size // given.uses
    # Several updates follow a step of more environments than `steps_per_update`.
    train_freq, gradient_steps = max(1, steps_per_update // given.envs), max(1, given.envs // steps_per_update)
    model = DQN(
        "CnnPolicy" if images else "MlpPolicy",
        VecFrameStack(envs, 4) if images else envs,
        learning_rate=1e-4,
        buffer_size=given.capacity,
        learning_starts=given.learning_starts,
        batch_size=given.batch_size,
        train_freq=train_freq,
        gradient_steps=gradient_steps,
        target_update_interval=10_000,
        exploration_initial_eps=EPSILON,  # from the start: a random action costs no network
        exploration_final_eps=EPSILON,
        device="cpu",
        **(more if images else {}),
    )
    model.learn(10**9, callback=Report())


if __name__ == "__main__":
    main()
