"""Policies of one run with networks of their own."""

from pathlib import Path
from typing import Any

import pytest

from appo import load_policy, train
from appo.algorithms.run.config import Config, check
from appo.utils.errors import UsageError

FLAGS: dict[str, Any] = {
    "env": "toy/Counter-v0",
    "inference": "serial",
    "num_policies": 2,
    "per_policy": {"use_rnn": [True, False], "hidden_size": [16, 24], "encoder_mlp_layers": [[8], [12, 6]]},
    "rollout": 8,
    "batch_size": 64,
    "num_envs_per_worker": 8,
    "num_workers": 1,
    "tensorboard": False,
    "verify_reproduction": True,
    "learning_rate": 0.0,
    "train_for_env_steps": 600,
    "seed": 1,
}


def test_policies_have_networks_of_their_own(tmp_path: Path) -> None:
    flags = FLAGS | {"train_dir": tmp_path, "experiment": "a"}
    first = train(flags)
    for figures in first.report.figures:
        assert figures["samples"] >= 600
        assert figures["train/reproduction_error"] < 1e-5
    memory, plain = (load_policy(first.directory, policy=policy) for policy in (0, 1))
    shapes = [{weights.shape for weights in one.get_weights().values()} for one in (memory, plain)]
    assert (8, 4) in shapes[0]
    assert (3 * 16, 16) in shapes[0]  # the gates of a GRU
    assert {(12, 4), (6, 12)} <= shapes[1]
    assert not any(3 * 24 in shape for shape in shapes[1])
    more = train(flags, train_for_env_steps=900)
    assert all(figures["env_steps"] >= 900 for figures in more.report.figures)
    assert all(figures["train/reproduction_error"] < 1e-5 for figures in more.report.figures)


def test_what_cannot_differ() -> None:
    given = {"env": "a", "experiment": "b", "num_policies": 2}
    with pytest.raises(UsageError, match="--per_policy encoder_custom: encoder_custom is the same for all policies"):
        check(Config.from_flat({**given, "per_policy": {"encoder_custom": ["a:B", "a:C"]}}))
    with pytest.raises(UsageError, match="--per_policy hidden_size: --with_pbt copies weights and state"):
        check(Config.from_flat({**given, "per_policy": {"hidden_size": [8, 16]}, "with_pbt": True}))
    alike = Config.from_flat(
        {**given, "per_policy": {"hidden_size": [512, 512], "gamma": [0.9, 0.99]}, "with_pbt": True}
    )
    check(alike)
    assert alike.per_policy == [{"gamma": 0.9}, {"gamma": 0.99}]
