from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.run.config import Config, resolve
from appo.algorithms.run.tuning.choice import Costs
from appo.algorithms.run.tuning.measure import Measurement
from appo.algorithms.run.tuning.network import probe
from appo.algorithms.tools.choosing import Contender, choice, compared


def chosen(tmp_path: Path, env_seconds: float, cores: int = 2, **flags: Any) -> str:
    """The line of an environment whose step takes so long, with an update of 1.5 ms and training of 20 us a step."""

    def measured(config: Config) -> Measurement:
        learn = 1.5e-3 if config.run.algo == "SAC" else 20e-6
        costs = Costs(env=((1, env_seconds),), act=((1, 40e-6),), learn=((1, learn),), env_bytes=0)
        return Measurement(probe(config), costs, 0.0)

    given = {"env": "Pendulum-v1", "train_dir": str(tmp_path), "experiment": "doctor", **flags}
    return choice(measured(resolve(given)[0]), measured, cores)


def test_seconds_to_a_return_are_steps_needed_by_steps_a_second() -> None:
    appo, sac = Contender("APPO", 1000.0, "a", "appo train --algo=APPO"), Contender("SAC", 250.0, "b", "")
    assert (appo.seconds, sac.seconds) == (0.01, 0.004)
    faster = (
        "--algo=SAC reaches a return 2.5 times as fast as APPO, if APPO needs 10 times as many steps"
        " (docs/choosing.md); SAC: b; APPO: a; type: "
    )
    assert compared(appo, sac) == compared(sac, appo) == faster
    assert compared(appo, sac._replace(samples_per_second=50.0)) == (
        "--algo=APPO reaches a return 2 times as fast as SAC, if APPO needs 10 times as many steps (docs/choosing.md);"
        " APPO: a; SAC: b; type: appo train --algo=APPO"
    )


def test_cheap_steps_are_for_ppo_and_slow_ones_for_sac(tmp_path: Path) -> None:
    # Two cores share 50 + 40 + 20 us and the hand-over of a trajectory; 0.9 of a learner makes updates of 1.5 ms.
    cheap = chosen(tmp_path, 50e-6)
    assert cheap.startswith("--algo=APPO reaches a return 3 times as fast as SAC, if APPO needs 10 times as many")
    assert "; SAC: env 50 us, act 40 us, learn 1.5 ms/sample -> local, 1 actor x 1 envs, predicted 594 sa" in cheap
    assert cheap.endswith("; type: appo train --algo=APPO --env=Pendulum-v1")
    # A step of SAC takes 2 ms, 40 us and 1.5 ms on two cores, and 15 us for the hand-over to either side.
    slow = chosen(tmp_path, 2e-3)
    assert slow.startswith("--algo=SAC reaches a return 7.1 times as fast as APPO, if APPO needs 10 times as many")
    assert "; SAC: env 2 ms, act 40 us, learn 1.5 ms/sample -> local, 2 actors x 1 envs, predicted 560 sa" in slow
    assert slow.endswith("; type: appo train --algo=SAC --env=Pendulum-v1 --num_workers=2")
    assert chosen(tmp_path, 2e-3, algo="SAC") == slow


def test_every_core_has_an_actor_where_the_only_actor_of_the_preset_is_the_limit(tmp_path: Path) -> None:
    many = chosen(tmp_path, 20e-3, cores=16)
    assert many.startswith("--algo=SAC reaches")
    assert "local, 16 actors x 1 envs" in many
    assert many.endswith(" --num_workers=16")
    asked = chosen(tmp_path, 20e-3, cores=16, num_workers=1)
    assert "SAC: env 20 ms, act 40 us, learn 1.5 ms/sample -> local, 1 actor x 1 envs" in asked


def test_flags_of_learning_stay_with_their_algorithm(tmp_path: Path) -> None:
    flags = {"encoder_mlp_layers": (8, 8), "env_kwargs": {"g": 9.0}, "ppo_epochs": 2}
    kept = " --env=Pendulum-v1 --env_kwargs g=9.0"
    assert chosen(tmp_path, 2e-3, **flags).endswith(f"--algo=SAC{kept} --encoder_mlp_layers=8,8 --num_workers=2")
    assert chosen(tmp_path, 50e-6, **flags).endswith(f"--algo=APPO{kept} --ppo_epochs=2 --encoder_mlp_layers=8,8")


def test_a_config_file_with_flags_of_learning_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "given.toml"
    path.write_text("gae_lambda = 0.9\nencoder_mlp_layers = [8, 8]\n")
    assert chosen(tmp_path, 2e-3, config=str(path)).endswith(
        "--algo=SAC --env=Pendulum-v1 --encoder_mlp_layers=8,8 --num_workers=2"
    )


def test_the_check_of_sac_decides_whether_sac_suits_the_actions(tmp_path: Path) -> None:
    assert chosen(tmp_path, 2e-3, env="CartPole-v1", algo="PPO") == (
        "--algo=PPO stays: --algo=SAC needs continuous actions, the environment has choices: take APEX, PQN, APPO or"
        " PPO"
    )


@pytest.mark.parametrize("which", ["SAC", "APPO"])
def test_without_costs_nothing_is_compared(tmp_path: Path, which: str) -> None:
    config, _ = resolve({"env": "Pendulum-v1", "train_dir": str(tmp_path), "experiment": "doctor"})
    costs = Costs(((1, 1e-3),), ((1, 1e-5),), ((1, 1e-6),), 0)
    own, *rest = (Measurement(probe(config), None if which == algo else costs, 0.0) for algo in ("APPO", "SAC"))
    said = choice(own, lambda _: rest[0], 2)
    assert said == "--algo=APPO stays: costs on a CPU decide, and none were measured"
