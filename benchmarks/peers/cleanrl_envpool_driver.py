"""PPO in one file, in the manner of CleanRL, on EnvPool; runs with an interpreter of its own.

    cleanrl_envpool_driver.py WORKLOAD

Written from the published description: Schulman et al. 2017 (arXiv:1707.06347), with the details that Huang et al. 2022
(ICLR Blog Track, "The 37 Implementation Details of PPO") list. One process plays and trains in turn; networks, batches
and epochs are those of `workloads.py`. It prints what has been trained on after every batch.
"""

import json
import os
import sys
import time
from dataclasses import dataclass

import envpool
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

GAMMA, LAMBDA = 0.99, 0.95
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Settings:
    env: str
    envs: int = 32
    rollout: int = 32
    minibatches: int = 1
    epochs: int = 1
    learning_rate: float = 2.5e-4
    clip: float = 0.1
    entropy: float = 0.01
    max_grad_norm: float = 0.5
    threads: int = 1  # threads of torch; more are slower for small networks


WORKLOADS = {
    "pong": Settings("Pong-v5", threads=CORES),
    "pong_4_epochs": Settings("Pong-v5", minibatches=4, epochs=4, threads=CORES),
    "cartpole": Settings("CartPole-v1", clip=0.2),
    "halfcheetah": Settings(
        "HalfCheetah-v4", envs=64, rollout=64, minibatches=4, epochs=2, learning_rate=3e-4, clip=0.2, entropy=0.0
    ),
}
PONG = {"reward_clip": True, "use_fire_reset": False, "episodic_life": False, "repeat_action_probability": 0.0}


class Normalizer:
    """Running mean and variance of vector observations (Chan et al. 1979)."""

    def __init__(self, size):
        self.mean, self.var, self.count = np.zeros(size), np.ones(size), 1e-4

    def __call__(self, obs):
        count = self.count + len(obs)
        delta = obs.mean(0) - self.mean
        squares = self.var * self.count + obs.var(0) * len(obs) + delta**2 * self.count * len(obs) / count
        self.mean, self.var, self.count = self.mean + delta * len(obs) / count, squares / count, count
        return np.clip((obs - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)


def layer(module, gain=2**0.5):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    def __init__(self, obs_space, action_space):
        super().__init__()
        self.image = len(obs_space.shape) == 3
        self.continuous = not hasattr(action_space, "n")
        actions = action_space.shape[0] if self.continuous else action_space.n
        if self.image:
            convolutions = [layer(nn.Conv2d(*c)) for c in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))]
            body = [m for c in convolutions for m in (c, nn.ReLU())]
            self.body = nn.Sequential(*body, nn.Flatten(), layer(nn.Linear(3136, 512)), nn.ReLU())
        else:
            sizes = (obs_space.shape[0], 64, 64)
            hidden = [m for a, b in zip(sizes, sizes[1:]) for m in (layer(nn.Linear(a, b)), nn.Tanh())]  # noqa: B905, RUF007
            self.body = nn.Sequential(*hidden)
        width = 512 if self.image else 64
        self.actor, self.critic = layer(nn.Linear(width, actions), 0.01), layer(nn.Linear(width, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(actions if self.continuous else 0))

    def forward(self, obs):
        features = self.body(obs.float() / 255 if self.image else obs)
        out, value = self.actor(features), self.critic(features)[:, 0]
        if self.continuous:
            return Independent(Normal(out, self.log_std.exp().expand_as(out)), 1), value
        return Categorical(logits=out), value


def advantages(reward, done, value, last_value):
    """Generalized advantage estimates [T, N] (Schulman et al. 2016, arXiv:1506.02438)."""
    result, trace = torch.zeros_like(reward), torch.zeros_like(last_value)
    for t in reversed(range(len(reward))):
        following = last_value if t == len(reward) - 1 else value[t + 1]
        alive = 1 - done[t]
        trace = reward[t] + GAMMA * following * alive - value[t] + GAMMA * LAMBDA * alive * trace
        result[t] = trace
    return result


def loss_of(agent, settings, batch):
    obs, action, log_prob, advantage, value, target = batch
    policy, new_value = agent(obs)
    ratio = (policy.log_prob(action) - log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    near = value + (new_value - value).clamp(-settings.clip, settings.clip)
    value_loss = 0.5 * torch.max((new_value - target) ** 2, (near - target) ** 2).mean()
    return policy_loss + 0.5 * value_loss - settings.entropy * policy.entropy().mean()


class Training:
    def __init__(self, settings):
        self.settings = settings
        kwargs = PONG if settings.env == "Pong-v5" else {}
        self.envs = envpool.make(settings.env, "gymnasium", num_envs=settings.envs, num_threads=CORES, seed=1, **kwargs)
        self.agent = Agent(self.envs.observation_space, self.envs.action_space)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=settings.learning_rate, eps=1e-5)
        image = self.agent.image
        self.normalize = (lambda obs: obs) if image else Normalizer(self.envs.observation_space.shape)
        obs = torch.from_numpy(self.normalize(self.envs.reset()[0]))
        shape = (settings.rollout, settings.envs)
        self.obs = torch.zeros(*shape, *obs.shape[1:], dtype=obs.dtype)
        action_shape = self.envs.action_space.shape if self.agent.continuous else ()
        self.action = torch.zeros(*shape, *action_shape, dtype=torch.float32 if self.agent.continuous else torch.int64)
        self.log_prob, self.reward, self.done, self.value = (torch.zeros(shape) for _ in range(4))
        self.next_obs = obs

    @torch.no_grad()
    def play(self):
        """Fill the buffers; return the values after the last step."""
        for t in range(self.settings.rollout):
            policy, self.value[t] = self.agent(self.next_obs)
            action = policy.sample()
            self.obs[t], self.action[t], self.log_prob[t] = self.next_obs, action, policy.log_prob(action)
            given = action.numpy().clip(-1, 1).astype(np.float64) if self.agent.continuous else action.numpy()
            obs, reward, terminated, truncated, _ = self.envs.step(given)
            self.next_obs = torch.from_numpy(self.normalize(obs))
            self.reward[t] = torch.from_numpy(reward)
            self.done[t] = torch.from_numpy(terminated | truncated)
        return self.agent(self.next_obs)[1]

    def train(self, last_value):
        advantage = advantages(self.reward, self.done, self.value, last_value)
        fields = (self.obs, self.action, self.log_prob, advantage, self.value, advantage + self.value)
        flat = [field.flatten(0, 1) for field in fields]
        for _ in range(self.settings.epochs):
            for rows in torch.randperm(len(flat[0])).chunk(self.settings.minibatches):
                loss = loss_of(self.agent, self.settings, [field[rows] for field in flat])
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), self.settings.max_grad_norm)
                self.optimizer.step()


def main():
    settings = WORKLOADS[sys.argv[1]]
    torch.set_num_threads(settings.threads)
    training, samples = Training(settings), 0
    while True:
        training.train(training.play())
        samples += settings.envs * settings.rollout
        print(json.dumps({"seconds": time.monotonic(), "samples": samples}), flush=True)


if __name__ == "__main__":
    main()
