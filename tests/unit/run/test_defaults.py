"""What an environment that is in no preset is trained with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from appo.algorithms.a3c import presets as a3c_presets
from appo.algorithms.appo import presets as learning_presets
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.run.config import FLAGS_BY_PART, Config, changed_flags, parse_train_flags, resolve
from appo.algorithms.run.defaults import (
    ORIGIN,
    chosen_in,
    completed,
    flags_by_kind,
    told,
)
from appo.algorithms.run.directory.page import command_line
from appo.algorithms.run.folder import journal
from appo.algorithms.run.training import _convert_flags
from appo.algorithms.run.trust import marked
from appo.envs import presets as env_presets
from appo.envs.presets import MANY_NUMBERS, MUJOCO_NAMES
from appo.envs.spaces import ActionForm, Space, spec_of
from appo.envs.spec import EnvSpec
from appo.utils.errors import UsageError

NUMBERS = env_presets.NUMBERS | learning_presets.NUMBERS
IMAGES = env_presets.IMAGES | learning_presets.IMAGES
UNKNOWN = "--env=my.games:Maze"
FEW, TWO = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2)
PICTURE = spaces.Box(0, 255, (40, 36, 3), "uint8")
LETTERS = spaces.Box(0, 127, (21, 79, 80), "uint8")
NUMBER = spaces.Box(-1.0, 1.0, (1,))
SMALL, LARGE = (64, 64), (128, 128)


def preset_of_numbers(count: int, *, continuous: bool, remembers: bool, rollout: int) -> dict[str, object]:
    network = env_presets.network_for_numbers(count, continuous=continuous, remembers=remembers)
    return {**network, **APPO().preset_by_kind(images=False, continuous=continuous, rollout=rollout)}


def preset_of_images(*, continuous: bool, rollout: int) -> dict[str, object]:
    network = env_presets.network_for_images(continuous=continuous)
    return {**network, **APPO().preset_by_kind(images=True, continuous=continuous, rollout=rollout)}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def spec(observation: Space = FEW, action: Space = TWO) -> EnvSpec:
    return spec_of(observation, action)


def config_of(*words: str, observation: Space = FEW, action: Space = TWO) -> Config:
    return completed(resolve(parse_train_flags([UNKNOWN, *words]))[0], spec(observation, action))


def differences(config: Config) -> dict[str, Any]:
    """Flags that are not as by default, of those that say what is learned and by which network."""
    parts = {part: getattr(config, part) for part in ("learning", "model")}
    return {
        name: getattr(parts[part], name)
        for part in parts
        for name, flag in FLAGS_BY_PART[part].items()
        if getattr(parts[part], name) != flag.default
    }


# ---- kinds


@pytest.mark.parametrize(
    ("observation", "action", "chosen"),
    [
        (FEW, TWO, a3c_presets.NUMBERS),
        (PICTURE, TWO, a3c_presets.IMAGES),
        (FEW, NUMBER, a3c_presets.NUMBERS | a3c_presets.CONTINUOUS),
    ],
)
def test_a3c_learns_unknown_environments_by_their_kind(
    observation: Space, action: Space, chosen: dict[str, object]
) -> None:
    config = config_of("--algo=A3C", observation=observation, action=action)
    found = {name: getattr(config.learning, name, None) for name in chosen}
    found["num_envs_per_worker"] = config.sampling.num_envs_per_worker
    assert found == chosen


def test_a_number_of_environments_that_is_given_stays_as_it_is() -> None:
    assert config_of("--algo=A3C", "--num_envs_per_worker=2").sampling.num_envs_per_worker == 2


@pytest.mark.parametrize(
    ("observation", "layers"),
    [
        (FEW, SMALL),
        (spaces.Box(-1.0, 1.0, (MANY_NUMBERS,)), SMALL),
        (spaces.Box(-1.0, 1.0, (MANY_NUMBERS + 1,)), LARGE),
        (spaces.Discrete(16), SMALL),
        (spaces.Discrete(500), LARGE),
        (spaces.MultiDiscrete([4, 60]), SMALL),
        (spaces.MultiDiscrete([4, 61]), LARGE),
        (spaces.MultiBinary(9), SMALL),
        (spaces.Dict({"a": FEW, "b": spaces.Dict({"c": spaces.Discrete(4)})}), SMALL),
        (spaces.Dict({"a": spaces.Box(-1.0, 1.0, (60,)), "b": spaces.Discrete(5)}), LARGE),
        (spaces.Dict({"a": FEW, "action_mask": spaces.MultiBinary(2)}), SMALL),
        (spaces.Tuple([FEW, spaces.Discrete(3)]), SMALL),
        (spaces.Box(0, 255, (3, 3, 7), "uint8"), SMALL),  # too small for the strides of the convolutions
        (spaces.Box(0, 255, (35, 35, 3), "uint8"), LARGE),
        (spaces.Box(0, 255, (84, 84), "uint8"), LARGE),
    ],
    ids=str,
)
def test_numbers_and_choices_get_a_small_network_without_memory(observation: Space, layers: tuple[int, ...]) -> None:
    found = differences(config_of(observation=observation))
    assert found == NUMBERS | {"encoder_mlp_layers": layers}
    assert not found["use_rnn"]


@pytest.mark.parametrize(
    "observation", [PICTURE, spaces.Dict({"a": FEW, "b": PICTURE}), spaces.Tuple([PICTURE, FEW])], ids=str
)
@pytest.mark.parametrize("action", [TWO, NUMBER], ids=str)
def test_images_get_the_default_network_without_memory(observation: Space, action: Space) -> None:
    config = config_of(observation=observation, action=action)
    assert config.by_kind == preset_of_images(continuous=action is NUMBER, rollout=32)
    assert config.by_kind.items() >= (IMAGES.items() if action is TWO else {"adaptive_stddev": False}.items())
    assert differences(config).items() <= config.by_kind.items()
    assert config.undecided == frozenset()


def test_a_net_for_images_may_be_asked_for() -> None:
    small = spaces.Box(0, 255, (20, 20, 3), "uint8")
    assert differences(config_of(observation=small)) != {}
    asked = {"encoder_type": "conv", "encoder_subtype": "convnet_dqn"}
    words = [f"--{name}={value}" for name, value in asked.items()]
    assert differences(config_of(*words, observation=small)) == IMAGES | asked
    with pytest.raises(UsageError, match="encoder convnet_dqn needs an image"):
        config_of(*words)
    # An encoder of one's own reads what it likes.
    assert not config_of(*words, "--encoder_custom=my.nets:Net").model.use_rnn


@pytest.mark.parametrize("action", [NUMBER, spaces.Tuple([TWO, NUMBER])], ids=str)
def test_actions_that_are_numbers_have_settings_of_their_own(action: Space) -> None:
    found = config_of(action=action)
    assert found.by_kind == preset_of_numbers(3, continuous=True, remembers=False, rollout=32)
    assert (found.model.adaptive_stddev, found.learning.exploration_loss_coeff) == (False, 0.0)
    assert config_of(action=spaces.MultiBinary(3)).by_kind == config_of().by_kind


@pytest.mark.parametrize("observation", [FEW, PICTURE], ids=str)
def test_policies_begin_nearer_to_the_middle_of_bounds_that_they_are_mapped_to(observation: Space) -> None:
    config = resolve(parse_train_flags([UNKNOWN]))[0]
    mapped, off = (spec_of(observation, NUMBER, form=ActionForm(scaled=scaled)) for scaled in (True, False))
    assert completed(config, mapped).model.initial_stddev == env_presets.SCALED["initial_stddev"] == 0.4
    assert completed(config, off).model.initial_stddev == 1.0
    assert completed(config, spec_of(observation, TWO, form=ActionForm(scaled=True))).model.initial_stddev == 1.0
    given = resolve(parse_train_flags([UNKNOWN, "--initial_stddev=0.7"]))[0]
    assert completed(given, mapped).model.initial_stddev == 0.7


def test_numbers_as_actions_are_learned_by_gae_but_for_steps_of_others() -> None:
    mixed = "--input=sampler:0.5,played:0.5"
    Path("played").mkdir()
    assert config_of().learning.with_vtrace  # choices
    assert not config_of(action=NUMBER).learning.with_vtrace
    assert config_of("--with_vtrace=True", action=NUMBER).learning.with_vtrace
    assert config_of(mixed, action=NUMBER).learning.with_vtrace
    known = ["--env=HalfCheetah-v5", mixed]
    assert resolve(parse_train_flags(known))[0].learning.with_vtrace
    assert not resolve(parse_train_flags(known[:1]))[0].learning.with_vtrace


def test_presets_of_numbers_between_bounds_begin_with_a_small_deviation() -> None:
    begins = {"Pendulum-v1": 0.5, **{f"{name}-v5": 0.4 for name in MUJOCO_NAMES}}  # of half the bounds
    assert {env: resolve(parse_train_flags([f"--env={env}"]))[0].model.initial_stddev for env in begins} == begins
    for algo, asked in (("PPO", 1.0), ("SAC", 1.0)):  # recipes and their own
        assert resolve(parse_train_flags(["--env=Swimmer-v5", f"--algo={algo}"]))[0].model.initial_stddev == asked


@pytest.mark.parametrize(
    ("words", "action", "iterations"),
    [
        ((), NUMBER, 8),
        ((), TWO, 32),
        (("--rollout=2048",), NUMBER, 32),
        (("--num_batches_per_iteration=4",), NUMBER, 4),
    ],
)
def test_ppo_moves_numbers_in_more_and_smaller_iterations(words: Any, action: Space, iterations: int) -> None:
    config = config_of("--algo=PPO", *words, action=action)
    assert config.learning.num_batches_per_iteration == iterations


def test_every_value_is_one_that_its_flag_takes() -> None:
    for continuous in (False, True):
        kinds = [preset_of_numbers(9, continuous=continuous, remembers=also, rollout=32) for also in (False, True)]
        for values in (*kinds, preset_of_images(continuous=continuous, rollout=512)):
            flat = json.loads(json.dumps(values))
            assert {name: Config.from_flat(flat).to_flat()[name] for name in flat} == flat
            assert values.keys() <= flags_by_kind(APPO())


# ---- who wins


def test_what_is_given_wins_each_by_itself() -> None:
    Path("f.json").write_text('{"nonlinearity": "relu", "gamma": 0.5, "learning_rate": 0.25}')
    words = ["--config=f.json", "--learning_rate=1e-4", "--encoder_mlp_layers=8"]
    config, origins = resolve(parse_train_flags([UNKNOWN, *words]))
    assert config.undecided.isdisjoint({"nonlinearity", "gamma", "learning_rate", "encoder_mlp_layers", "env"})
    found = completed(config, spec())
    assert found.learning.learning_rate == 1e-4  # its default, but given
    assert (found.model.nonlinearity, found.model.encoder_mlp_layers, found.learning.gamma) == ("relu", (8,), 0.5)
    assert (found.model.use_rnn, found.learning.ppo_epochs) == (False, NUMBERS["ppo_epochs"])
    origins |= dict.fromkeys(chosen_in(found, config.undecided), ORIGIN)
    assert {name for name, origin in origins.items() if origin == ORIGIN} == NUMBERS.keys() - {
        "learning_rate",
        "encoder_mlp_layers",
        "nonlinearity",
    }
    assert (origins["learning_rate"], origins["nonlinearity"]) == ("command line", "config file")
    assert (origins["use_rnn"], origins["adam_eps"]) == (ORIGIN, "default")


@pytest.mark.parametrize("env", ["CartPole-v1", "toy/Zero-v0", "HalfCheetah-v5", "ALE/Pong-v5"])
def test_a_preset_wins_whole(env: str) -> None:
    config, _ = resolve({"env": env})
    assert config.undecided == frozenset()
    assert completed(config, spec()) is config


def test_a_saved_run_stays_as_it_is() -> None:
    config = config_of("--experiment=a", "--gamma=0.5")
    config.run.run_directory.mkdir(parents=True)
    journal(config.run.run_directory, marked(config.to_flat() | {"seed": 5}), [], [0])
    again, origins = resolve(parse_train_flags(["--experiment=a", "--ppo_epochs=2"]))
    assert again.undecided == frozenset()
    found = completed(again, spec())
    assert changed_flags(config.to_flat(), found.to_flat()) == ["seed none -> 5", "ppo_epochs 4 -> 2"]
    assert origins["learning_rate"] == "saved run"
    assert told(found, again.undecided) == ""
    # A run that was begun with the defaults of a version that knew no kinds.
    old = Config.from_flat({"env": "my.games:Maze", "experiment": "b"})
    old.run.run_directory.mkdir(parents=True)
    journal(old.run.run_directory, marked(old.to_flat() | {"seed": 5}), [], [0])
    found = completed(resolve(parse_train_flags(["--experiment=b"]))[0], spec())
    assert (found.model.use_rnn, found.learning.learning_rate, found.model.hidden_size) == (True, 1e-4, 512)


def test_flags_are_checked_once_all_are_decided() -> None:
    with pytest.raises(UsageError, match="--microbatch_size=512 is larger than --batch_size=256"):
        config_of("--microbatch_size=512")
    assert config_of("--rollout=512").learning.batch_size == 512  # what is not given makes room for what is
    with pytest.raises(UsageError, match="--batch_size=96 is not a multiple of --rollout=64"):
        config_of("--rollout=64", "--batch_size=96")
    everyone = config_of("--num_policies=2", "--per_policy", "learning_rate=1e-4,1e-2")
    assert [values["learning_rate"] for values in everyone.per_policy] == [1e-4, 1e-2]


# ---- a memory


def test_a_memory_alone_is_enough_to_ask_for() -> None:
    config = config_of("--use_rnn=True")
    assert config.model.use_rnn
    assert config.model.hidden_size == 64
    assert config.learning.segment_steps == config.learning.rollout == 32
    assert config_of("--use_rnn=True", "--hidden_size=16").model.hidden_size == 16
    assert config_of("--use_rnn=True", observation=spaces.Discrete(500)).model.hidden_size == 128
    seeing = config_of("--use_rnn=True", observation=PICTURE)
    assert differences(seeing) == {name: value for name, value in IMAGES.items() if name != "use_rnn"}


# ---- what is said


def test_the_choice_is_said_in_one_line_with_how_to_get_a_memory() -> None:
    undecided = resolve(parse_train_flags([UNKNOWN]))[0].undecided
    assert told(config_of(), undecided) == (
        "kind of observation: no preset for my.games:Maze, which shows numbers and no image: encoder_mlp_layers=64,64"
        " nonlinearity=tanh use_rnn=False batch_size=256 num_batches_per_iteration=4 ppo_epochs=4 ppo_clip_ratio=0.2"
        " learning_rate=0.001 vtrace_lambda=0.95 exploration_loss_coeff=0.01 max_grad_norm=1;"
        " --use_rnn=True adds a memory"
    )
    assert "which shows images: normalize_images=True use" in told(config_of(observation=PICTURE), undecided)
    shown = spaces.Dict({"view": PICTURE, "letters": LETTERS})
    line = told(config_of(observation=shown), undecided, spec(shown))
    assert "which shows images (by key view [40, 36, 3]): normalize_images=True use" in line
    line = told(config_of(observation=LETTERS), undecided, spec(LETTERS))
    assert (
        "which shows numbers and no image (obs [21, 79, 80] has not 1 to 4 channels in up to 4 frames, as a picture:"
        " --encoder_type=conv reads such keys as one): encoder_mlp_layers=128,128"
    ) in line
    line = told(config_of("--algo=SAC", action=spaces.Box(-1, 1, (1,))), undecided)
    assert "use_rnn=False" in line
    assert "memory" not in line  # SAC refuses one
    line = told(config_of("--use_rnn=True", "--ppo_epochs=1"), undecided - {"use_rnn", "ppo_epochs"})
    assert "memory" not in line
    assert "epochs" not in line
    assert "hidden_size=64" in line
    own = told(config_of("--encoder_custom=my.nets:Net"), undecided)  # which replaces the encoder
    assert "encoder_" not in own
    assert "nonlinearity=tanh" in own
    assert chosen_in(config_of(), frozenset()) == {}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--use_rnn=True"],
        ["--learning_rate=1e-4", "--ppo_epochs=3"],
        ["--rollout=512"],
        ["--encoder_mlp_layers=512,512", "--nonlinearity=elu"],
    ],
    ids=str,
)
@pytest.mark.parametrize("observation", [FEW, PICTURE], ids=["numbers", "image"])
def test_the_shortest_command_gives_the_same_flags_again(words: list[str], observation: Space) -> None:
    first = config_of("--experiment=a", *words, observation=observation)
    line = command_line(first.to_flat(), first.by_kind)
    as_ever = {"--encoder_mlp_layers=512,512", "--nonlinearity=elu"} if observation is PICTURE else set()
    assert len(line.split()) == len(["appo", "train", UNKNOWN, *(word for word in words if word not in as_ever)])
    again = config_of("--experiment=a", *line.split()[3:], observation=observation)
    assert again == first


def test_a_program_may_hand_on_a_configuration_that_is_not_complete() -> None:
    config = resolve({"env": "my.games:Maze", "gamma": 0.5, "experiment": "a"})[0]
    again = resolve(_convert_flags(config, {}))[0]
    assert again == config
    assert again.undecided == config.undecided
    whole = resolve(_convert_flags(completed(config, spec()), {}))[0]
    assert whole.undecided == frozenset()
    assert replace(whole, by_kind={}) == replace(completed(config, spec()), by_kind={})
