"""CartPole, balanced by a rule: whole episodes for `--input=tests.integration.balancing:episodes`."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from appo.algorithms.datasets.episodes import Episode

EPISODES, MOST_STEPS = 12, 200
STEPS = EPISODES * MOST_STEPS
"""Of all episodes: the rule never lets the pole fall."""


def episodes() -> tuple[Any, Any, list[dict[str, Any]]]:
    env = gymnasium.make("CartPole-v1", max_episode_steps=MOST_STEPS)
    return env.observation_space, env.action_space, [_episode(env, seed) for seed in range(EPISODES)]


def reversed_actions(episode: Episode) -> Episode:
    """The episode as if the other action had been taken in every step, for `--postprocess_inputs`."""
    return replace(episode, action=1 - episode.action)


def _episode(env: Any, seed: int) -> dict[str, Any]:
    now, _ = env.reset(seed=seed)
    observations, actions, rewards = [now], [], []
    random = np.random.default_rng(seed)
    while True:
        tilted = now[2] + 0.3 * now[3] + 0.05 * now[1] > 0
        action = int(tilted) if random.random() < 0.9 else int(random.integers(2))
        now, reward, terminated, truncated, _ = env.step(action)
        observations.append(now)
        actions.append(action)
        rewards.append(float(reward))
        if terminated or truncated:
            ended = np.arange(len(actions)) == len(actions) - 1
            return {
                "observations": np.array(observations),
                "actions": np.array(actions),
                "rewards": np.array(rewards),
                "terminations": ended & terminated,
                "truncations": ended & truncated,
            }
