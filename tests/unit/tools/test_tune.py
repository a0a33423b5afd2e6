"""A study without processes: space, seeds as rungs, early ends, the journal, and results."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from appo.algorithms.run.config import Config, resolve
from appo.algorithms.runtime.messages import EpisodesDone
from appo.algorithms.tools.flags import TuneConfig
from appo.algorithms.tools.train import toml_text
from appo.algorithms.tools.tune.results import Results, draw, summary, table, verdict
from appo.algorithms.tools.tune.space import (
    Range,
    Space,
    built_in,
    differences,
    parse_space,
    refused,
    require_effect,
    values_of,
    words_of_preset,
)
from appo.algorithms.tools.tune.study import (
    FREE_FLAGS,
    NEAR_TRIALS,
    Job,
    Record,
    Study,
    cut_torn_line,
    goes_on,
    is_hopeless,
    reached,
)
from appo.algorithms.tools.tune.trial import Outcome, Returns
from appo.algorithms.tools.tune.tune import _new_settings
from appo.utils.errors import UsageError

SPACE = {"learning_rate": Range(1e-4, 1e-2, True), "ppo_epochs": Range(1, 8, False), "nonlinearity": ("elu", "tanh")}
BATCHES = "num_batches_per_iteration"
FIRST = {"learning_rate": 1e-3, "ppo_epochs": 4, "nonlinearity": "tanh"}


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return resolve({"env": "CartPole-v1"})[0]


def test_a_file_names_ranges_and_choices(preset: Config) -> None:
    content = {
        "learning-rate": ["1e-4", 0.01, "log"],
        "gamma": [0.9, 0.99],
        "ppo_epochs": [1, 2, 1],
        "encoder_mlp_layers": [[64, 64], "32"],
        "rollout": {"choices": [32, 64]},
        "normalize_input": [True, False],
        "num_batches_per_iteration": [1, 16, True],
    }
    assert parse_space(content, preset.table, "x") == {
        "learning_rate": Range(1e-4, 0.01, True),
        "gamma": Range(0.9, 0.99, False),
        "ppo_epochs": (1, 2),
        "encoder_mlp_layers": ((64, 64), (32,)),
        "rollout": (32, 64),
        "normalize_input": (True, False),
        "num_batches_per_iteration": Range(1, 16, True),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gama": [0.9, 0.99]}, "x: unknown flag gama; did you mean gamma?"),
        ({"gamma": [0.9, 2]}, "x: --gamma must be at most 1, got 2"),
        ({"gamma": [0.99, 0.9]}, "x: gamma needs two numbers, the lower first, got"),
        ({"gamma": [0, 0.9, "log"]}, "x: gamma needs two numbers, the lower first, above 0 for log, got"),
        ({"gamma": 0.9}, r"x: gamma needs \[low, high\], \[low, high, log\] or a list of choices, got 0.9"),
        ({"nonlinearity": ["elu", "gelu"]}, "x: --nonlinearity must be one of|x: --nonlinearity=gelu"),
        ({"seed": [1, 2]}, "x: seed is decided by appo tune"),
        ({}, "x names no flag to tune"),
    ],
)
def test_mistakes_in_a_space_are_one_line(preset: Config, content: Mapping[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_space(content, preset.table, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lr_schedule_kl_threshold": [0.001, 0.1]}, "x: --lr_schedule_kl_threshold has no effect: it is for --lr_sch"),
        ({"recurrence": {"choices": [1, 0]}}, "x: --recurrence has no effect: it is for networks with a memory"),
        ({"vtrace_rho": [1, 2], "with_vtrace": [False]}, "x: --vtrace_rho has no effect: it is for --with_vtrace"),
        ({"policy_workers_per_policy": [1, 2]}, "x: --policy_workers_per_policy has no effect: .* --inference=central"),
        ({"stats_avg": [10, 100]}, "x: stats_avg has no effect: it is for reports, and changes no return"),
        ({"save_every_sec": [60, 600]}, "x: save_every_sec has no effect: it is for files, and changes no return"),
        ({"keep_checkpoints": [1, 9]}, "x: keep_checkpoints has no effect: it is for files, and changes no return"),
        ({"device": ["cpu"]}, "x: device has one value, so nothing to search: give --device to all runs"),
        ({"lr_schedule_kl_threshold": [0.001, 0.1], "lr_schedule": ["linear", "kl_adaptive_epoch"]}, ""),
        ({"recurrence": {"choices": [1, 0]}, "use_rnn": [False, True]}, ""),
        ({"vtrace_rho": [1, 2], "with_vtrace": [False, True]}, ""),
        ({"target_kl": [0, 1], "ppo_epochs": [1, 4]}, ""),
    ],
)
def test_a_flag_of_a_space_has_an_effect_in_some_trial(
    content: Mapping[str, object], message: str, preset: Config
) -> None:
    runs = Config.from_flat({**preset.to_flat(), "inference": "serial"})
    space = parse_space(content, preset.table, "x")
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        require_effect(space, runs, "x")


@pytest.mark.parametrize("algo", ["APPO", "PPO", "A3C", "APEX"])
def test_the_first_trial_of_the_built_in_space_is_the_preset(algo: str, preset: Config) -> None:
    config, _ = resolve({"env": "CartPole-v1", "algo": algo})
    space = parse_space(built_in(config, {"gamma": 0.9}), config.table, "x")
    assert {"learning_rate", "rollout", "encoder_mlp_layers"} <= space.keys()
    assert not space.keys() & {"gamma", "hidden_size"}  # fixed by the user; without an effect on numbers
    words = words_of_preset(space, config.to_flat())
    assert differences(values_of(words, space, config, 100), config.to_flat()) == {}
    flat = Config.from_flat(config.to_flat() | values_of(words, space, config, 100)).to_flat()
    assert flat == config.to_flat()


@pytest.mark.parametrize(
    ("fixed", "name", "choices"),
    [
        ({}, "rollout", [32, 8, 16, 64, 128]),
        ({"use_rnn": True, "recurrence": 32}, "rollout", [32, 64, 128]),
        ({}, "batch_size", [256, 64, 128, 512, 1024]),
        ({"microbatch_size": 128}, "batch_size", [256, 128, 512, 1024]),
        ({"algo": "PPO", "microbatch_size": 128}, "batch_size", [256, 512, 1024]),
        ({"algo": "APEX", "train_for_env_steps": 2500}, "learning_starts", [1000, 250, 500, 2000]),
        ({"train_for_seconds": 2.0}, "lr_schedule", ["constant", "linear"]),
        ({"train_for_seconds": 2.0, "lockstep": True, "device": "cpu"}, "lr_schedule", None),
    ],
)
def test_the_built_in_space_has_no_choice_that_fixed_flags_forbid(
    fixed: dict[str, object], name: str, choices: list[object] | None, preset: Config
) -> None:
    space = built_in(resolve({"env": "CartPole-v1", **fixed})[0], fixed)
    assert space.get(name) == (choices and {"choices": choices})


def test_a_rounded_number_stays_within_its_range(preset: Config) -> None:
    space = {"gamma": Range(0.90001, 0.99996, False)}
    drawn = [values_of({"gamma": word}, space, preset, math.inf)["gamma"] for word in (0.90001, 0.912345, 0.99996)]
    assert drawn == [0.90001, 0.9123, 0.99996]


def test_values_that_no_start_takes_together_give_way_to_those_of_the_first_trial(preset: Config) -> None:
    space = {"gamma": (0.9,), "microbatch_size": (0, 128), "batch_size": (256, 64)}
    words = {"gamma": "0.9", "microbatch_size": "128", "batch_size": "64"}
    fitted = {"gamma": 0.9, "microbatch_size": 0, "batch_size": 64}
    assert values_of(words, space, preset, math.inf) == fitted


def test_choices_that_a_start_refuses_beside_the_first_trial_are_found(preset: Config) -> None:
    space = {"learning_rate": Range(0.01, 0.1, True), "microbatch_size": (0, 128, 77), "ppo_epochs": (1, 2)}
    assert refused(space, preset) == [("microbatch_size", 77)]


def test_a_preset_outside_of_the_space_moves_to_its_nearest_value(preset: Config) -> None:
    space = {"learning_rate": Range(0.01, 0.1, True), "nonlinearity": ("elu", "relu"), "gamma": Range(0.9, 1, False)}
    words = words_of_preset(space, preset.to_flat())
    assert words == {"learning_rate": 0.01, "nonlinearity": "elu", "gamma": 0.99}
    assert list(differences(values_of(words, space, preset, 1e6), preset.to_flat())) == [
        "learning_rate",
        "nonlinearity",
    ]


def test_batches_fit_into_the_budget_and_hold_whole_rollouts(preset: Config) -> None:
    sizes = (16, 1024)
    space = {"batch_size": sizes, "num_batches_per_iteration": sizes, "learning_rate": Range(1e-4, 1, True)}
    words = {"batch_size": "1024", "num_batches_per_iteration": "16", "learning_rate": 0.00123456}
    values = {"batch_size": 1024, "num_batches_per_iteration": 4, "learning_rate": 0.001235}
    assert values_of(words, space, preset, 20_000) == values
    assert values_of(words, space, preset, math.inf) == values | {"num_batches_per_iteration": 16}
    assert values_of(words | {"batch_size": "16"}, space, preset, math.inf)["batch_size"] == 32  # the rollout
    with pytest.raises(UsageError, match="batch_size=17 is no value of the study"):
        values_of(words | {"batch_size": "17"}, space, preset, math.inf)


@pytest.mark.parametrize(
    ("algo", "fixed", "drawn", "most_samples", "fitted"),
    [
        # CartPole: 1 minibatch of 256 in rollouts of 32. A fixed batch shortens the rollout.
        ("PPO", {"batch_size": 64}, {"rollout": 128}, math.inf, {"rollout": 64}),
        ("PPO", {"batch_size": 96}, {"rollout": 128}, math.inf, {"rollout": 32}),
        ("PPO", {"batch_size": 64}, {"rollout": 128, BATCHES: 2}, math.inf, {"rollout": 128, BATCHES: 2}),
        ("APPO", {"batch_size": 64}, {"rollout": 128, BATCHES: 4}, math.inf, {"rollout": 64, BATCHES: 4}),
        # A rollout that is fixed, too, needs more minibatches.
        ("PPO", {"batch_size": 64, "rollout": 128, BATCHES: 4}, {BATCHES: 1}, math.inf, {BATCHES: 2}),
        # A batch is rounded up to whole rollouts,
        ("PPO", {}, {"rollout": 128, "batch_size": 64}, math.inf, {"rollout": 128, "batch_size": 128}),
        # unless fewer than 4 iterations would remain.
        ("PPO", {BATCHES: 8}, {"rollout": 2048, "batch_size": 64}, 20_000, {"rollout": 512, "batch_size": 64}),
        ("PPO", {BATCHES: 8}, {"rollout": 2048, "batch_size": 64}, 65_536, {"rollout": 2048, "batch_size": 2048}),
        ("PPO", {BATCHES: 8}, {"rollout": 2048, "batch_size": 64}, 65_535, {"rollout": 1024, "batch_size": 1024}),
        ("APPO", {BATCHES: 1}, {"rollout": 2048, "batch_size": 64}, 4_096, {"rollout": 1024, "batch_size": 1024}),
        # A rollout that is fixed stays.
        ("PPO", {"rollout": 2048, BATCHES: 8}, {"batch_size": 64}, 20_000, {"batch_size": 2048}),
    ],
)
def test_batches_and_rollouts_fit_without_a_change_of_fixed_flags(
    algo: str, fixed: dict[str, object], drawn: dict[str, int], most_samples: float, fitted: dict[str, int],
    preset: Config,
) -> None:  # fmt: skip
    config = resolve({"env": "CartPole-v1", "algo": algo, **fixed})[0]
    space = {name: (value,) for name, value in drawn.items()}
    words = {name: str(value) for name, value in drawn.items()}
    assert values_of(words, space, config, most_samples) == fitted


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (1.0, [], True),
        (1.0, [2.0], False),
        (1.0, [2.0, 0.0, 0.0], True),  # second of four
        (1.0, [2.0, 3.0, 0.0], False),
        (1.0, [1.0, 1.0], True),  # no other is better
    ],
)
def test_the_best_third_goes_on(own: float, others: list[float], expected: bool) -> None:
    assert goes_on(own, others) == expected


def test_a_run_below_the_median_ends_after_a_third() -> None:
    others = [{1: 5.0, 4: score} for score in (1.0, 2.0, 3.0, 4.0)] + [{2: 5.0}]  # the last one has ended early
    assert is_hopeless({1: 0.0, 4: 2.5}, 4, others)
    assert not is_hopeless({1: 0.0, 4: 3.0}, 4, others)
    assert not is_hopeless({1: 3.5, 4: 2.5}, 4, others)  # once better than the median
    assert not is_hopeless({3: 0.0}, 3, others)
    assert not is_hopeless({4: 0.0}, 4, others[1:])


def test_a_run_is_compared_with_the_runs_of_all_seeds() -> None:
    others = [{1: 5.0, 4: score} for score in (1.0, 2.0, 3.0)] + [{4: 8.0, 14: 9.0}]
    assert is_hopeless({4: 9.0, 14: 2.5}, 14, others)  # the median is 3, the first seed does not count
    assert not is_hopeless({4: 0.0, 13: 3.0, 14: 2.0}, 14, others)
    assert not is_hopeless({4: 9.0, 14: 0.0}, 14, others[1:])  # four runs


def returns_of(most_env_steps: int | None, *learners: int) -> Returns:
    returns = Returns(most_env_steps)
    returns.learners = learners or (0,)
    return returns


def play(returns: Returns, lengths: list[int], values: list[float], policy: int = 0, exploring: bool = False) -> None:
    count = len(lengths)
    message = EpisodesDone(
        np.full(count, policy, np.int32), np.array(values), np.array(lengths), (), np.full(count, exploring)
    )
    returns.on_episodes(message)


@pytest.mark.parametrize("report", [1, 7, 60])
def test_a_tenth_of_the_env_steps_is_cut_between_episodes(report: int) -> None:
    returns = returns_of(500)
    assert returns.score(10) is None
    values = [float(number) for number in range(60)]
    for begin in range(0, 60, report):
        part = values[begin : begin + report]
        play(returns, [10] * len(part), part)
    assert returns.values[-1] == (10, 49.0)  # the others end beyond the budget
    assert returns.score(10) == 39.5  # the last tenth has 5 episodes: the last 20 count
    assert returns.score(9) == 34.5
    assert returns.score(1) == 2.0


def test_a_tenth_with_many_episodes_counts_alone() -> None:
    returns = returns_of(1000)
    play(returns, [900], [7.0])  # ends with the ninth tenth
    play(returns, [4], [9.0], exploring=True)
    play(returns, [4] * 25, [1.0] * 25)
    assert len(returns.values) == 25  # the last one ends beyond the budget
    assert (returns.score(9), returns.score(10)) == (7.0, 1.0)


def test_the_clock_cuts_a_budget_of_time() -> None:
    returns = returns_of(None)
    play(returns, [900] * 30, [1.0] * 30)
    returns.tenth = 2
    play(returns, [900] * 25, [2.0] * 25)
    assert (returns.score(1), returns.score(2)) == (1.0, 2.0)


def test_every_policy_has_the_whole_budget() -> None:
    returns = returns_of(100, 0, 1)
    play(returns, [4] * 25, [1.0] * 25)
    play(returns, [10] * 8, [2.0] * 8, policy=1)
    play(returns, [1] * 20, [3.0] * 20, policy=1)
    play(returns, [1], [9.0], policy=1)
    assert len(returns.values) == 53
    assert returns.score(10) == 2.7  # 3 of 1 and 10 of 3 in the last tenth, and 7 of 3 before


def test_policies_that_never_learn_do_not_count() -> None:
    returns = returns_of(None, 0)
    play(returns, [10] * 20, [1.0] * 20)
    play(returns, [10] * 20, [-1.0] * 20, policy=1)
    assert returns.score(1) == 1.0


def test_a_run_is_not_compared_with_runs_that_are_behind() -> None:
    first = dict.fromkeys(range(1, 11), 1.0)
    assert reached({**first, 11: 2.0, 12: 3.0}, 3) == first
    assert reached({**first, 11: 2.0, 12: 3.0}, 2) == {**first, 11: 2.0, 12: 3.0}
    assert reached(first, 9) == first
    assert reached({}, 1) == {}


def test_an_unfinished_last_line_is_cut(tmp_path: Path) -> None:
    for content, expected in ((b"", b""), (b"a\nbc", b"a\n"), (b"a\n", b"a\n"), (b"bc", b"")):
        (tmp_path / "x").write_bytes(content)
        cut_torn_line(tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == expected


def outcome(score: float) -> Outcome:
    return Outcome(score, 100, 1.5)


def test_trials_climb_seed_by_seed_and_a_study_goes_on_from_its_journal(tmp_path: Path) -> None:
    study = Study(tmp_path, SPACE, (1, 2), FIRST)
    first, second = study.next(3), study.next(3)
    assert first == Job(0, FIRST, 0, 1)
    assert second is not None
    study.add(second, outcome(5.0))  # the best so far
    study.add(first, outcome(1.0))  # the preset runs with all seeds in any case
    assert [(job.number, job.seed) for job in (study.next(3), study.next(3)) if job] == [(1, 2), (0, 2)]
    third = study.next(3)
    assert third is not None
    study.add(third, outcome(9.0))
    assert study.next(3) == third._replace(rung=1, seed=2)
    # Killed here: all trials run with their second seed again, with the same parameters, however good others are.
    study = Study(tmp_path, SPACE, (1, 2), FIRST)
    again = [job for job in (study.next(3), study.next(3), study.next(3)) if job]
    assert again == [Job(0, FIRST, 1, 2), second._replace(rung=1, seed=2), third._replace(rung=1, seed=2)]
    for job, score in zip(again, (2.0, 3.0, -9.0), strict=True):
        study.add(job, outcome(score))
    last = study.next(4)
    assert last is not None
    assert study.next(4) is None
    study.add(last, outcome(1.2))
    assert study.next(4) is None  # not among the best third: no second seed
    found = [(one.state, one.score, len(one.outcomes)) for one in study.records()]
    assert found == [("finished", 1.5, 2), ("finished", 4.0, 2), ("finished", 0.0, 2), ("finished", 1.2, 1)]
    winner = study.winner()
    assert winner is not None
    assert winner.number == 1
    study.confirm(Job(1, {}, 0, 3, confirms=True), outcome(3.5))
    study.confirm(Job(1, {}, 0, 4, confirms=True), "a reason")
    study = Study(tmp_path, SPACE, (1, 2), FIRST)
    assert study.next(4) is None
    assert study.confirmed(1) == {3: outcome(3.5), 4: "a reason"}
    assert study.confirmed(0) == {}


def test_the_first_trials_change_few_flags_of_the_preset(tmp_path: Path) -> None:
    space: Space = {f"flag_{number}": (0, 1) for number in range(40)}
    first: dict[str, object] = dict.fromkeys(space, "0")
    changes = []
    for number in range(1 + NEAR_TRIALS + 1):
        if number % 5 == 0:
            study = Study(tmp_path, space, (1,), first)  # another start
        job = study.next(99)
        assert job is not None
        study.stop(job.number)
        changes.append(sum(word != "0" for word in job.words.values()))
    assert changes[0] == 0
    assert max(changes[1:-1]) <= FREE_FLAGS < changes[-1]
    assert sum(changes[1:-1]) > NEAR_TRIALS


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"op_code": 99, "worker_id": "a"}', "{}"])
def test_a_damaged_journal_is_one_line(line: str, tmp_path: Path) -> None:
    Study(tmp_path, SPACE, (1,), FIRST)
    with (tmp_path / "journal.log").open("a") as journal:
        journal.write(f"{line}\n")
    with pytest.raises(UsageError, match=f"^{tmp_path}/journal.log is damaged: "):
        Study(tmp_path, SPACE, (1,), FIRST)


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.log").mkdir()
    with pytest.raises(UsageError, match=f"^{tmp_path}/journal.log is damaged: IsADirectoryError: "):
        Study(tmp_path, SPACE, (1,), FIRST)


def test_a_renamed_study_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    study = Study(tmp_path / "a", SPACE, (1,), FIRST)
    job = study.next(2)
    assert job is not None
    study.add(job, outcome(1.0))
    (tmp_path / "a").rename(tmp_path / "b")
    assert [one.score for one in Study(tmp_path / "b", SPACE, (1,), FIRST).records()] == [1.0]


def test_hopeless_and_failed_trials_are_ended_once(tmp_path: Path) -> None:
    study = Study(tmp_path, SPACE, (1,), FIRST)
    jobs = [job for _ in range(8) if (job := study.next(8))]
    for job in jobs[:6]:
        study.report(job, 4, 10.0)
        study.add(job, outcome(10.0))
    assert not study.report(jobs[6], 4, 10.0)
    assert study.report(jobs[6], 5, 10.0) is False
    assert study.report(jobs[7], 4, 9.0)
    study.stop(7)
    study.stop(6, "a reason")
    assert [(one.state, one.error) for one in study.records()[6:]] == [("failed", "a reason"), ("stopped", "")]
    assert Study(tmp_path, SPACE, (1,), FIRST).next(8) is None


def test_a_trial_may_win_before_a_run_of_the_preset_has_ended(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [Record(0, "running", {}), Record(1, "finished", {}, (outcome(5.0),))]
    found = Results({}, records, {0: {}, 1: {}}, records[1], {}, {})
    assert verdict(found) == ["preset: no run has ended", "trial 1: 5.00, chosen for this score"]
    draw(found, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 0


def test_results_compare_the_winner_with_the_preset() -> None:
    records = [
        Record(0, "finished", {}, (outcome(1.0), outcome(3.0))),
        Record(1, "stopped", {}),
        Record(2, "finished", {}, (outcome(5.0), outcome(5.0))),
    ]
    changes: dict[int, dict[str, object]] = {0: {}, 1: {"gamma": 0.5}, 2: {"gamma": 0.9}}
    confirmed = {3: outcome(4.0), 4: outcome(6.0)}
    found = Results({"env": "a", "gamma": 0.9}, records, changes, records[2], confirmed, {"gamma": 1.0})
    assert table(found) == [
        "trial     state  seeds  score  seconds  changes of the preset",
        "    2  finished      2   5.00        3  gamma=0.9",
        "    0  finished      2   2.00        3  none",
        "    1   stopped      0      -        0  gamma=0.5",
    ]
    assert verdict(found) == [
        "preset: 2.00 [-10.71, 14.71]",
        "trial 2: 5.00 [5.00, 5.00], chosen for this score",
        "trial 2 with seeds 3,4: 5.00 [-7.71, 17.71]",
    ]
    said = summary(found)
    assert said["states"] == {"finished": 2, "stopped": 1}
    assert said["winner"] == 2
    assert [one["score"] for one in said["trials"]] == [2.0, None, 5.0]
    failed = found._replace(confirmed={3: outcome(4.0), 4: "a\nreason"})
    assert verdict(failed)[2:] == ["trial 2 with seed 4 failed: a reason", "trial 2 with seeds 3: 4.00"]
    assert summary(failed)["confirmed"] == {3: outcome(4.0)._asdict(), 4: {"error": "a\nreason"}}
    worse = found._replace(confirmed={3: outcome(1.0)})
    assert verdict(worse)[-1].startswith("with new seeds the winner is not better than the preset")
    moved = worse._replace(changes={**changes, 0: {"gamma": 0.6, "rollout": 64}})
    assert verdict(moved)[0] == "trial 0 (the preset except gamma=0.6 rollout=64): 2.00 [-10.71, 14.71]"
    assert verdict(moved)[-1] == "with new seeds the winner is not better than trial 0: keep trial 0, or search on"
    assert verdict(moved._replace(winner=records[0]))[1:] == [
        "no trial with all seeds was better than trial 0",
        "trial 0 with seeds 3: 1.00",
    ]
    assert verdict(found._replace(winner=records[0]))[1:] == [
        "no trial with all seeds was better than the preset",
        "trial 0 with seeds 3,4: 5.00 [-7.71, 17.71]",
    ]


class Pixels(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, True, False, {}


def test_an_unknown_environment_of_images_is_tuned_as_one(tmp_path: Path) -> None:
    config = TuneConfig(study="s", trial_env_steps=50_000, train_dir=str(tmp_path))
    space = _new_settings(config, {"env": f"{__name__}:Pixels"}, {}).space
    assert "hidden_size" in space
    assert "encoder_mlp_layers" not in space


def test_a_file_of_all_flags_asks_for_what_differs_from_the_defaults(tmp_path: Path) -> None:
    given: dict[str, object] = {"env": "CartPole-v1", "config": str(tmp_path / "all.toml")}
    every = resolve({"env": "CartPole-v1"})[0].to_flat() | {"gamma": 0.9, "plot": False}
    del every["config"], every["experiment"]
    (tmp_path / "all.toml").write_text("\n".join(f"{name} = {toml_text(value)}" for name, value in every.items()))
    config = TuneConfig(study="s", trial_env_steps=50_000, train_dir=str(tmp_path))
    shared = _new_settings(config, given, {}).shared
    assert (shared["gamma"], shared["plot"], shared["inference"]) == (0.9, False, "serial")
    assert not shared.keys() & {"tensorboard", "save_every_sec", "learner_main_loop_num_cores"}
