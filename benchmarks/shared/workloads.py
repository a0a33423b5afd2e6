"""Workloads of all benchmarks: an environment with flags.

Networks, batches, rollouts and epochs equal the settings of the peers, see `benchmarks/peers`.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.tuning.measure import resolve_defaults
from appo.utils.errors import UsageError

# Petrenko et al. 2020 (arXiv:2006.11751): one pass over batches of 1024, trajectories of 32 steps.
ONE_PASS = {"rollout": 32, "batch_size": 1024, "num_batches_per_iteration": 1, "ppo_epochs": 1}
PONG = {
    "env_kwargs": "repeat_action_probability=0",
    "normalize_images": False,
    "encoder_subtype": "convnet_atari",  # without a GPU the preset has a smaller encoder
    "hidden_size": 512,
}


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Return flags as words of a command line."""
    return [f"--{name}={value}" for name, value in flags.items()]


class Workload(NamedTuple):
    """A training.

    Attributes:
        env: id of the environment.
        flags: flags of algorithm, network and environment.
        what: phrase for tables.
        further: words of a command line that override the flags.
    """

    env: str
    flags: Mapping[str, object]
    what: str
    further: tuple[str, ...] = ()

    def words(self, **more: object) -> list[str]:
        """Return the command line; later flags override earlier flags."""
        return [f"--env={self.env}", *words_of({**self.flags, **more}), *self.further]

    def config(self, **more: object) -> Config:
        """Return the configuration of a run; an environment without a preset is created once."""
        return resolve_defaults(parse_train(self.words(**more)))


WORKLOADS = {
    "pong": Workload("ALE/Pong-v5", PONG | ONE_PASS, "Pong, Nature network, 1 epoch"),
    "pong_4_epochs": Workload(
        "ALE/Pong-v5",
        PONG | {"rollout": 32, "batch_size": 256, "num_batches_per_iteration": 4, "ppo_epochs": 4},
        "Pong, Nature network, 4 epochs",
    ),
    "pong_fp32": Workload(
        "ALE/Pong-v5", PONG | ONE_PASS | {"precision": "fp32"}, "Pong, Nature network, 1 epoch, float32"
    ),
    "vizdoom": Workload(
        "VizdoomBasic-v1",
        ONE_PASS | {"batch_size": 2048, "normalize_images": False, "hidden_size": 512},
        "VizDoom basic 128x72, convolutions and GRU of 512",
    ),
    "cartpole": Workload(
        "CartPole-v1",
        ONE_PASS | {"env_vectorization": "python", "num_envs_per_worker": 128},
        "CartPole from gymnasium.make, MLP 64x64",
    ),
    "cartpole_vector": Workload(
        "CartPole-v1",
        # A batch takes 20 ms: with two waiting batches, as in Sample Factory, actors and learner wait less for turns.
        ONE_PASS | {"batch_size": 16384, "num_envs_per_worker": 256, "num_minibatches_to_accumulate": 2},
        "CartPole from its vector entry point, MLP 64x64, batch 16,384",
    ),
    "halfcheetah": Workload("HalfCheetah-v5", {}, "HalfCheetah, MLP 64x64, 2 epochs of 4 x 1024"),
}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of workloads: by name, or an environment with any flags of train_appo.py."""
    names = ", ".join(WORKLOADS)
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, metavar="NAME", help=f"of {names} (default: all)")
    parser.add_argument("--env", help="an environment instead, with its preset and any further flags of train_appo.py")


def chosen_workloads(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Workload]:
    """Return the selected workloads; `flags` are the words unknown to the parser."""
    if arguments.env:
        what = " ".join([arguments.env, *flags])
        return {what: Workload(arguments.env, {}, what, tuple(flags))}
    if flags:
        raise UsageError(f"{flags[0]} is no flag of this benchmark; flags of train_appo.py go with --env")
    return {name: WORKLOADS[name] for name in arguments.workload or WORKLOADS}
