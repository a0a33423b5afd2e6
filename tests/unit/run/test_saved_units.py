"""Saved runs keep the units in which their policies act, and flags that are younger than a run have a value for it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.sac.config import SACConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(name: str, **flags: object) -> None:
    """Write a run that saved these flags and no others."""
    folder = Path("train_dir", name)
    Path(folder, "checkpoint_p0", "ckpt_000000000001").mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps({"env": "Pendulum-v1", **flags}))


def scaling(*words: str) -> str:
    return parse_train(["--env=Pendulum-v1", *words]).env.action_scaling


@dataclass(frozen=True)
class LaterConfig(APPOConfig):
    """Flags of APPO, and a younger one."""

    units: str = flag("new", "units of something", choices=("new", "old"), before="old", fixed_on_resume=True)


@dataclass(frozen=True)
class Later(APPO):
    """APPO with a flag that older runs do not have."""

    flags: ClassVar[type[APPOConfig]] = LaterConfig


LATER = f"{__name__}:Later"


def units_of(config: Config) -> str:
    assert isinstance(config.learning, LaterConfig)
    return config.learning.units


def units(*words: str) -> str:
    return units_of(parse_train(["--env=Pendulum-v1", f"--algo={LATER}", *words]))


def test_a_run_without_a_younger_flag_has_its_value_of_before_and_cannot_change() -> None:
    saved("old", algo=LATER)
    assert units("--experiment=new") == "new"
    assert units("--experiment=old", "--trust") == "old"
    with pytest.raises(UsageError, match="run old cannot change units old -> new"):
        units("--experiment=old", "--trust", "--units=new")


def test_what_plays_a_run_reads_a_younger_flag_so() -> None:
    assert units_of(Config.from_saved({"env": "a", "algo": LATER})) == "old"
    assert units_of(Config.from_saved({"env": "a", "algo": LATER, "units": "new"})) == "new"
    assert units_of(Config.from_flat({"env": "a", "algo": LATER})) == "new"


def test_weights_keep_their_units() -> None:
    saved("old", action_scaling="off")
    saved("new", action_scaling="auto", action_distribution="tanh_gaussian")
    assert scaling("--experiment=b", "--init_from=old") == "off"
    assert scaling("--experiment=b", "--init_from=old", "--action_scaling=auto") == "auto"
    config = parse_train(["--env=Pendulum-v1", "--experiment=b", "--init_from=new"]).env
    assert (config.action_scaling, config.action_distribution) == ("auto", "tanh_gaussian")


def test_weights_of_a_stranger_bring_the_units_of_its_actions_and_nothing_else() -> None:
    theirs = {"algo": "no_such_module:Algorithm", "encoder_custom": "no_such_module:Encoder", "rollout": "many"}
    saved("theirs", action_scaling="off", **theirs)
    assert scaling("--experiment=b", "--init_from=theirs") == "off"
    saved("damaged", action_scaling="sideways")
    with pytest.raises(UsageError, match=r"saved configuration of run damaged: .*action_scaling"):
        scaling("--experiment=b", "--init_from=damaged")


def bins(*words: str) -> int | None:
    return parse_train(["--env=Pendulum-v1", *words]).env.continuous_as_bins


def test_bins_are_those_of_the_run_and_of_the_weights() -> None:
    saved("plain")
    saved("binned", action_scaling="auto", continuous_as_bins=7)
    assert bins("--experiment=new") is None
    assert bins("--experiment=binned") == 7
    assert bins("--experiment=b", "--init_from=binned") == 7
    assert bins("--experiment=b", "--init_from=plain") is None
    assert Config.from_saved({"env": "a"}).env.continuous_as_bins is None
    with pytest.raises(UsageError, match="run binned cannot change continuous_as_bins 7 -> 9"):
        bins("--experiment=binned", "--continuous_as_bins=9")
    with pytest.raises(UsageError, match="run plain cannot change continuous_as_bins none -> 9"):
        bins("--experiment=plain", "--continuous_as_bins=9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--continuous_as_bins=1",), "--continuous_as_bins must be at least 2, got 1"),
        (("--continuous_as_bins=5", "--action_distribution=tanh_gaussian"), "without --action_distribution=tanh_ga"),
        (("--continuous_as_bins=5", "--clip_actions=False"), "without --clip_actions=False"),
        (("--continuous_as_bins=5", "--algo=BC", "--input=a"), "=5 does not go with --input: datasets have numbers"),
        (("--continuous_as_bins=5", "--algo=APEX", "--input=a"), "=5 does not go with --input: datasets have numbers"),
        (("--continuous_as_bins=5", "--algo=APEX", "--input=sampler:0.9,a:0.1"), "=5 does not go with --input"),
        (("--continuous_as_bins=5", "--input=sampler:0.9,a:0.1"), "=5 does not go with --input"),
    ],
)
def test_bins_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bins(*words)


def test_bins_go_with_input_that_is_the_sampler_alone() -> None:
    assert bins("--continuous_as_bins=5", "--input=sampler") == 5


def test_squashing_needs_the_map_to_the_bounds() -> None:
    with pytest.raises(UsageError, match=r"tanh_gaussian .* needs --action_scaling=auto"):
        scaling("--action_distribution=tanh_gaussian", "--action_scaling=off")


def test_a_run_of_sac_from_before_its_presets_had_other_critics_keeps_its_critics() -> None:
    words = ["--algo=SAC", "--env=Hopper-v5", "--trust"]
    saved("before", algo="SAC", env="Hopper-v5")
    found = [parse_train([*words, f"--experiment={name}"]).learning for name in ("new", "before")]
    assert [one.categorical_critics for one in found if isinstance(one, SACConfig)] == [128, 0]


@pytest.mark.parametrize(("name", "other"), [("gamma", 0.9), ("n_steps", 1)])
def test_what_atoms_mean_stays_where_critics_predict_distributions(name: str, other: float) -> None:
    words = ["--algo=SAC", "--env=Hopper-v5", "--trust", f"--{name}={other}", "--experiment"]
    values = {"algo": "SAC", "env": "Hopper-v5", "gamma": 0.99, "n_steps": 3, "rollout": 4}
    saved("numbers", **values, categorical_critics=0)
    assert parse_train([*words, "numbers"]).learning.categorical_critics == 0
    saved("atoms", **values, categorical_critics=128)
    assert parse_train([*words[:3], "--gamma=0.99", "--n_steps=3", "--experiment=atoms"]).learning.n_steps == 3
    with pytest.raises(UsageError, match=f"run atoms cannot change {name} "):
        parse_train([*words, "atoms"])


def test_values_per_policy_of_fixed_flags_stay() -> None:
    saved("both", num_policies=2, per_policy={"nonlinearity": "elu,relu", "gamma": "0.9,0.99"})
    words = ["--env=Pendulum-v1", "--experiment=both", "--trust"]
    for given in (["nonlinearity=elu, relu", "gamma=0.5,0.6"], ["nonlinearity=elu,relu"], []):
        assert parse_train([*words, *(["--per_policy", *given] if given else [])]).sampling.num_policies == 2
    for given, change in (
        (["nonlinearity=elu,tanh"], "elu,relu -> elu,tanh"),
        (["gamma=0.5,0.6"], "elu,relu -> none"),
        (["nonlinearity=elu,relu", "hidden_size=8,9"], "hidden_size none -> 8,9"),
    ):
        with pytest.raises(UsageError, match=f"run both cannot change per_policy .*{change}"):
            parse_train([*words, "--per_policy", *given])


def test_the_same_command_goes_on_where_a_preset_gives_the_environment_arguments() -> None:
    words = ["--env=Ant-v5", "--preset=sample_efficient", "--experiment=ant", "--env_kwargs", "healthy_reward=2"]
    first = parse_train(words)
    assert first.env.env_kwargs == {"include_cfrc_ext_in_observation": False, "healthy_reward": 2}
    saved("ant", **first.to_flat())
    assert parse_train([*words, "--trust"]).env.env_kwargs == first.env.env_kwargs
    assert parse_train(["--experiment=ant", "--trust"]).env.env_kwargs == first.env.env_kwargs
    with pytest.raises(UsageError, match=r"cannot change env_kwargs .*healthy_reward=2 -> .*healthy_reward=3"):
        parse_train([*words[:-1], "healthy_reward=3", "--trust"])


def test_values_with_which_a_population_began_stay() -> None:
    saved("pbt", num_policies=2, with_pbt=True, per_policy={"gamma": "0.9,0.99"})
    words = ["--env=Pendulum-v1", "--experiment=pbt", "--trust", "--per_policy"]
    assert parse_train([*words, "gamma=0.9,0.99"]).population.with_pbt
    for given, change in (
        (["gamma=0.5,0.6"], "gamma 0.9,0.99 -> 0.5,0.6"),
        (["gamma=0.9,0.99", "learning_rate=1e-3,1e-4"], "learning_rate none -> 1e-3,1e-4"),
    ):
        with pytest.raises(UsageError, match=f"run pbt cannot change per_policy {change}"):
            parse_train([*words, *given])
