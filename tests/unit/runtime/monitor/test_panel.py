"""The panel as text, at the sizes of real terminals."""

import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from appo.algorithms.parts.config import SURROGATE_PANEL
from appo.algorithms.runtime.monitor.curves import Trace
from appo.algorithms.runtime.monitor.overview import Overview
from appo.algorithms.runtime.monitor.panel import Snapshot, chart, draw, render
from appo.algorithms.runtime.monitor.performance import Performance, RoleTimes

ACTORS = {"env": 0.58, "inference": 0.24, "framework": 0.09, "waiting": 0.05, "copying": 0.04}
PERFORMANCE = Performance(
    roles={
        "main": RoleTimes(1, {"waiting": 1.0}, 0.01),
        "actor": RoleTimes(2, ACTORS, 1.4),
        "learner": RoleTimes(1, {"waiting": 0.52, "training": 0.44, "copying": 0.03, "framework": 0.01}, 0.5),
    },
    cpu_us={},
    busy_cores=1.93,
    cores=2,
    samples_per_second=1306.0,
    limit_samples_per_second=1420.0,
    bottleneck="all 2 cores are full, 61% of it environment",
)
RECORD: dict[str, Any] = {
    "policy": 0, "env_steps": 5_400_000, "perf/env_steps_per_second": 65_432.0, "perf/samples_per_second": 16_358.0,
    "reward/mean": 475.314, "reward/min": -12.0, "reward/max": 500.0, "len/mean": 480.2,
    "train/explained_variance": 0.912, "train/value_loss": 0.02005, "train/entropy": 0.8558,
    "train/kl_divergence": 1.5e-4, "train/grad_norm": 0.23, "train/learning_rate": 0.001, "train/policy_lag_mean": 1.45,
    "train/policy_lag_max": 4.0,
}  # fmt: skip
OVERVIEW = Overview(
    elapsed_seconds=3723.4,
    seconds_left=1500.0,
    share=0.54,
    env_steps=5_400_000,
    samples=1_350_000,
    discarded=0,
    restarts=1,
    env_rebuilds=0,
    memory_bytes=1288 << 20,
    performance=PERFORMANCE,
    policies=(RECORD,),
    warnings=("12:00:01 actor_1 was killed (SIGKILL); it is started again in 0.5 s, for the first time in this run",),
)


def trace(count: int = 40) -> Trace:
    rising = Trace()
    for number in range(count):
        rising.add(number * 10.0, 20.0 + 12.0 * number if number != 30 else 100.0)
    return rising


def snapshot(**changed: Any) -> Snapshot:
    return Snapshot(
        "CartPole-v1_3",
        "CartPole-v1",
        "training",
        "10M env steps",
        replace(OVERVIEW, **changed),
        trace(),
        SURROGATE_PANEL,
    )


def text(shown: Snapshot, columns: int = 80, rows: int = 24) -> list[str]:
    return render(draw(shown, columns, rows), columns, colour=False, terminal=False)


def test_it_fits_and_says_everything() -> None:
    assert text(snapshot()) == EXPECTED.splitlines()


def test_a_replay_takes_the_place_of_the_lag() -> None:
    figures = {"size": 123_456.0, "uses_per_step": 8.0, "mean_priority": 0.7312, "age_samples": 51_234.0}
    shown = text(snapshot(policies=(RECORD | {f"replay/{name}": value for name, value in figures.items()},)))
    (line,) = [line for line in shown if "replay" in line]
    assert line.strip("│ ").split("  ")[0] == "replay"
    assert "123k steps · 8 uses a step · priority 0.731 · 51.2k steps old" in line
    assert not [line for line in shown if "versions" in line]


@pytest.mark.parametrize("columns", [60, 79, 80, 131, 132, 200])
@pytest.mark.parametrize("rows", [10, 14, 22, 60])
@pytest.mark.parametrize("policies", [0, 1, 2, 20])
def test_every_line_has_the_width_of_the_panel_and_there_are_not_too_many(columns, rows, policies) -> None:
    records = tuple(RECORD | {"policy": policy} for policy in range(policies))
    lines = text(snapshot(policies=records, warnings=OVERVIEW.warnings * 5), columns, rows)
    assert {cell_len(line) for line in lines} == {columns}
    assert len(lines) <= rows


def test_in_a_low_terminal_the_least_important_is_left_out() -> None:
    shown = "\n".join(text(snapshot(), rows=10))
    for word in ("54% of 10M env steps, 25 min left", "65.4k env steps/s", "475.31", "bottleneck", "2 actors"):
        assert word in shown
    assert "losses" not in shown
    two_aims = "\n".join(text(replace(snapshot(), aim="10M env steps or a mean return of 475"), columns=60))
    assert "─ 54% of 10M env steps …, 25 min left │" in two_aims


@pytest.mark.parametrize("columns", [11, 19, 39, 59])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("policies", [0, 1, 20])
def test_in_a_small_terminal_no_line_is_too_wide_and_none_too_many(columns, rows, policies) -> None:
    records = tuple(RECORD | {"policy": policy} for policy in range(policies))
    lines = text(replace(snapshot(policies=records), name="漢字\x1b[2J" * 9), columns, rows)
    assert (max(map(cell_len, lines)) <= columns, 1 <= len(lines) <= rows) == (True, True)
    assert not set("".join(lines)) & {"\x1b", "\x07", "\r"}


def test_in_a_small_terminal_the_most_important_lines_are_there() -> None:
    assert text(snapshot(), 39, 8) == [
        "CartPole-v1_3 · CartPole-v1 · training",
        "━━━━━━━━━━━━─────────── 54% 25 min left",
        "return 475.31 (-12.00 to 500.00)",
        "▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▂▇▇▇▇▇███",
        "5.4M env steps, 65.4k/s",
        "92% of the limit",
        "all 2 cores are full, 61% of it enviro…",
        "! 12:00:01 actor_1 was killed (SIGKILL…",
    ]
    assert text(snapshot(), 19, 4) == [
        "CartPole-v1_3 · Ca…",
        "━━─ 54% 25 min left",
        "return 475.31 (-12…",
        "5.4M env steps, 65…",
    ]
    assert text(snapshot(), 11, 1)[0].startswith("54%")


def test_a_run_of_which_nothing_is_known_yet() -> None:
    unknown = Overview(0.0, None, None, 0, 0, 0, 0, 0, None, None, ({"policy": 0, "env_steps": 0},), ())
    shown = "\n".join(text(Snapshot("a", "b", "training", "a mean return of 475", unknown, Trace())))
    assert "until a mean return of 475" in shown
    assert "no episode has ended yet" in shown
    assert "nothing is trained yet" in shown


def test_the_best_policies_come_first() -> None:
    records = tuple(RECORD | {"policy": policy, "reward/mean": 10.0 * policy} for policy in range(11))
    lines = [line.strip("│ ") for line in text(snapshot(policies=records), rows=40)]
    start = next(number for number, line in enumerate(lines) if line.startswith("policy"))
    assert [line.split()[0] for line in lines[start + 1 : start + 9]] == ["10", *map(str, range(9, 2, -1))]
    assert lines[start + 9] == "and 3 more"


@pytest.mark.parametrize("colour", [True, False])
def test_without_colour_there_is_none(colour: bool) -> None:
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", "".join(render(draw(snapshot(), 80, 24), 80, colour=colour))))
    plain = {"0", "1", "2"}  # reset, bold, dim
    assert (codes <= plain) == (not colour)


def test_nothing_in_a_name_or_a_warning_moves_the_cursor() -> None:
    evil = "\x1b[2J\x07\r\n"
    shown = replace(snapshot(warnings=(f"12:00:00 {evil}",)), name=f"a{evil}", env=evil, aim=evil)
    for columns in (80, 200):
        lines = text(shown, columns)
        assert {cell_len(line) for line in lines} == {columns}
        assert not set("".join(lines)) & {"\x1b", "\x07", "\r"}


@pytest.mark.parametrize(("scale", "marks"), [(-1e6, ("-1,000,000", "-40,000,000")), (-3e12, ("-3e+12", "-1.2e+14"))])
def test_huge_returns_leave_the_chart_its_width(scale: float, marks: tuple[str, str]) -> None:
    falling = Trace()
    for number in range(40):
        falling.add(number * 10.0, scale * (1 + number))
    lines = render(draw(replace(snapshot(), trace=falling), 60, 30), 60, colour=False, terminal=False)
    upper, lower = (line for line in lines if line.startswith(tuple(f"│ {mark.rjust(11)} " for mark in marks)))
    assert (upper.split()[1], lower.split()[1]) == marks
    assert lines.index(lower) == lines.index(upper) + 2


def test_a_chart_is_scaled_to_its_range() -> None:
    assert chart([0, 1, 2, 3, 4, 5, 6, 7], 1) == ["▁▂▃▄▅▆▇█"]
    assert chart([0.0, 7.0, 15.0], 2) == ["  █", "▁██"]
    assert chart([3.0, 3.0], 2) == ["  ", "▁▁"]


EXPECTED = """\
╭─ CartPole-v1_3 · CartPole-v1 · training ─────────────────────────────────────╮
│ progress    ━━━━━━━━━━━━━━━━────────────── 54% of 10M env steps, 25 min left │
│ speed       5.4M env steps · 65.4k env steps/s · 16.4k samples/s             │
│ return      475.31 · from -12.00 to 500.00 · episodes of 480 steps           │
│      488.00                                             ▁▂▂▂▂ ▃▃▄▄▄▅▅▆▆▆▇▇▇█ │
│                                  ▁▁▁▂▂▂▃▃▄▄▄▅▅▅▅▆▇▇▇▇████████ ██████████████ │
│       20.00 ▁▂▂▂▃▃▃▃▄▅▅▅▅▆▆▆▇▇▇██████████████████████████████▅██████████████ │
│ losses      value 0.02 · explained 0.912 · entropy 0.856 · kl 0.00015        │
│             gradient 0.23 · rate 0.001                                       │
│ lag         1.4 versions · 4 at most · 0 samples discarded                   │
│ 2 actors    ━━━━━━━━━━━━━━━─  env 58%  inference 24%  framework 9%           │
│ learner     ━━━━━━━━────────  waiting 52%  training 44%  copying 3%          │
│ limit       1420 samples/s, at 92%                                           │
│ bottleneck  all 2 cores are full, 61% of it environment                      │
│ machine     1.9 of 2 cores busy · 1.3 GiB of memory · 1 restart              │
│ ! 12:00:01 actor_1 was killed (SIGKILL); it is started again in 0.5 s, for … │
╰──────────────────────────────────────────────────────────────────── 1:02:03 ─╯
"""
