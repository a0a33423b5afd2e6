"""DQN in one file, in the manner of CleanRL's `dqn_atari`; runs with the interpreter of Stable-Baselines3.

    cleanrl_dqn_driver.py ENV --batch_size=B --uses=U --learning_starts=N --capacity=N --threads=N

Written from the description in CleanRL's documentation (docs.cleanrl.dev, "Deep Q-Learning") and Mnih et al. 2015: one
environment, played and trained on in turn, with the replay and the wrappers of Stable-Baselines3, squared errors and
gradients clipped to 0.5. An update of B samples after every B / U steps uses each step U times. It prints how many
agent steps have been taken once it trains.
"""

import argparse
import json
import time

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, ResizeObservation
from stable_baselines3.common.atari_wrappers import ClipRewardEnv, FireResetEnv, MaxAndSkipEnv, NoopResetEnv
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn

REPORT_SECONDS = 0.5
GAMMA, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, TARGET_INTERVAL = 0.99, 0.05, 1e-4, 0.5, 1000


def make(name):
    if not name.startswith("ALE/"):
        return gymnasium.make(name)
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(name, frameskip=1, repeat_action_probability=0.0)
    for wrapper in (NoopResetEnv, MaxAndSkipEnv, FireResetEnv, ClipRewardEnv):
        env = wrapper(env)
    env = GrayscaleObservation(ResizeObservation(env, (84, 84)))
    return FrameStackObservation(env, 4)


def network(obs_space, actions):
    if len(obs_space.shape) == 3:
        convolutions = [nn.Conv2d(*c) for c in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))]
        body = [m for c in convolutions for m in (c, nn.ReLU())]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))
    size = obs_space.shape[0]
    return nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("env")
    for flag in ("batch_size", "uses", "learning_starts", "capacity", "threads"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    env = make(given.env)
    images = len(env.observation_space.shape) == 3
    scale = 255.0 if images else 1.0
    q, target = (network(env.observation_space, env.action_space.n) for _ in range(2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)
    replay = ReplayBuffer(
        given.capacity, env.observation_space, env.action_space, "cpu", optimize_memory_usage=images,
        handle_timeout_termination=False,
    )  # fmt: skip
    due, generator = 0.0, np.random.default_rng(1)
    obs, _ = env.reset(seed=1)
    for step in range(1, 10**9):
        if generator.random() < EPSILON:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = q(torch.as_tensor(np.asarray(obs), dtype=torch.float32)[None] / scale).argmax(1).item()
        following, reward, terminated, truncated, info = env.step(action)
        replay.add(np.asarray(obs), np.asarray(following), np.array([action]), reward, terminated, [info])
        obs = env.reset()[0] if terminated or truncated else following
        if step <= given.learning_starts or step % (given.batch_size // given.uses):
            continue
        data = replay.sample(given.batch_size)
        with torch.no_grad():
            best = target(data.next_observations.float() / scale).amax(1)
            wanted = data.rewards.flatten() + GAMMA * best * (1 - data.dones.flatten())
        found = q(data.observations.float() / scale).gather(1, data.actions)[:, 0]
        loss = nn.functional.mse_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if step % TARGET_INTERVAL == 0:
            target.load_state_dict(q.state_dict())
        now = time.monotonic()
        if now >= due:
            due = now + REPORT_SECONDS
            print(json.dumps({"seconds": now, "samples": step}), flush=True)


if __name__ == "__main__":
    main()
