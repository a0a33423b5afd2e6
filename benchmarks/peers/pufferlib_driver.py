"""PufferLib's own trainer on a Gymnasium environment; runs with a separate interpreter.

    pufferlib_driver.py WORKLOAD FOLDER

The trainer is unchanged except that the dashboard is not drawn. Environments step one after another in the trainer's
process, the fastest way where workers would spin on few cores. The driver prints the samples trained on after every
batch.
"""

import configparser
import functools
import json
import os
import sys
import time
from ast import literal_eval
from pathlib import Path

import gymnasium
import torch
from torch import nn

os.chdir(sys.argv[2])  # the import of pufferlib creates a link in the current folder
import pufferlib.emulation  # noqa: E402
import pufferlib.pufferl  # noqa: E402
import pufferlib.pytorch  # noqa: E402
import pufferlib.vector  # noqa: E402

ENVS, ROLLOUT, HIDDEN = 32, 32, 64
WORKLOADS = {"cartpole": "CartPole-v1"}


class Policy(nn.Module):
    def __init__(self, env):
        super().__init__()
        init = pufferlib.pytorch.layer_init
        inputs, actions = env.single_observation_space.shape[0], env.single_action_space.n
        layers = (init(nn.Linear(inputs, HIDDEN)), nn.Tanh(), init(nn.Linear(HIDDEN, HIDDEN)), nn.Tanh())
        self.body = nn.Sequential(*layers)
        self.actor, self.critic = init(nn.Linear(HIDDEN, actions), std=0.01), init(nn.Linear(HIDDEN, 1), std=1)

    def forward(self, observations, state=None):
        features = self.body(observations.float())
        return self.actor(features), self.critic(features)

    forward_eval = forward


def make(name, buf=None, seed=None):
    return pufferlib.emulation.GymnasiumPufferEnv(env=gymnasium.make(name), buf=buf, seed=seed)


def settings(folder):
    """Return PufferLib's defaults with the common settings of all contenders."""
    defaults = configparser.ConfigParser()
    defaults.read(Path(pufferlib.__file__).with_name("config") / "default.ini")
    found = {}
    for name, text in defaults["train"].items():
        try:
            found[name] = literal_eval(text)
        except (SyntaxError, ValueError):
            found[name] = text
    batch = ENVS * ROLLOUT
    common = {"batch_size": batch, "minibatch_size": batch, "bptt_horizon": ROLLOUT, "update_epochs": 1}
    adam = {"optimizer": "adam", "learning_rate": 2.5e-4, "adam_beta1": 0.9, "adam_eps": 1e-5}
    endless = {"total_timesteps": 10**10, "checkpoint_interval": 10**9, "data_dir": folder}
    return {**found, **common, **adam, **endless, "device": "cpu", "use_rnn": False, "env": "benchmark"}


def main():
    workload, folder = sys.argv[1:]
    torch.set_num_threads(1)  # more are slower for small networks
    env = functools.partial(make, WORKLOADS[workload])
    envs = pufferlib.vector.make(env, num_envs=ENVS, backend=pufferlib.vector.Serial)
    told = sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        trainer = pufferlib.pufferl.PuffeRL(settings(folder), envs, Policy(envs.driver_env))
        while True:
            trainer.evaluate()
            trainer.train()
            print(json.dumps({"seconds": time.monotonic(), "samples": trainer.global_step}), file=told, flush=True)


if __name__ == "__main__":
    main()
