"""Runs of before keep the units in which their policies act."""

import json
from pathlib import Path

import pytest

from appo.algorithms.run.config import Config, parse_train
from appo.utils.errors import UsageError


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(name: str, **flags: object) -> None:
    """A run with these flags; a version of before had no --action_scaling."""
    folder = Path("train_dir", name)
    Path(folder, "checkpoint_p0", "ckpt_000000000001").mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps({"env": "Pendulum-v1", **flags}))


def scaling(*words: str) -> str:
    return parse_train(["--env=Pendulum-v1", *words]).env.action_scaling


def test_a_run_of_before_resumes_as_it_was_and_cannot_change() -> None:
    saved("old")
    assert scaling("--experiment=new") == "auto"
    assert scaling("--experiment=old") == "off"
    with pytest.raises(UsageError, match="run old cannot change action_scaling off -> auto"):
        scaling("--experiment=old", "--action_scaling=auto")


def test_weights_of_before_keep_their_units() -> None:
    saved("old")
    saved("new", action_scaling="auto", action_distribution="tanh_gaussian")
    assert scaling("--experiment=b", "--init_from=old") == "off"
    assert scaling("--experiment=b", "--init_from=old", "--action_scaling=auto") == "auto"
    config = parse_train(["--env=Pendulum-v1", "--experiment=b", "--init_from=new"]).env
    assert (config.action_scaling, config.action_distribution) == ("auto", "tanh_gaussian")


def test_weights_of_a_stranger_bring_the_units_of_its_actions_and_nothing_else() -> None:
    saved("theirs", algo="no_such_module:Algorithm", encoder_custom="no_such_module:Encoder", rollout="many")
    assert scaling("--experiment=b", "--init_from=theirs") == "off"
    saved("damaged", action_scaling="sideways")
    with pytest.raises(UsageError, match=r"saved configuration of run damaged: .*action_scaling"):
        scaling("--experiment=b", "--init_from=damaged")


def test_what_plays_a_saved_run_reads_its_flags_so() -> None:
    assert Config.from_saved({"env": "a"}).env.action_scaling == "off"
    assert Config.from_saved({"env": "a", "action_scaling": "auto"}).env.action_scaling == "auto"
    assert Config.from_saved({"env": "a"}).env.agent_id == "off"
    assert Config.from_flat({"env": "a"}).env.agent_id == "auto"


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
