import logging
import sys
from pathlib import Path

import pytest

from appo.algorithms.runtime.custom_summaries import CustomSummaries
from appo.utils.errors import UsageError

NUMBER = 3


def figures(policy: int, statistics: dict[str, float]) -> dict[str, float]:
    statistics.clear()  # it is given a copy
    return {"custom/policy": policy}


def failing(policy: int, statistics: dict[str, float]) -> dict[str, float]:
    if policy:
        raise KeyError("reward\n/mean")
    return {"custom/x": "no number"}  # type: ignore[dict-item]


def test_figures_are_what_the_function_returns() -> None:
    statistics = {"env_steps": 5.0}
    assert CustomSummaries(f"{__name__}:figures")(2, statistics) == {"custom/policy": 2.0}
    assert statistics == {"env_steps": 5.0}
    assert CustomSummaries("")(2, statistics) == {}


def test_what_it_raises_costs_its_figures_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    custom = CustomSummaries(f"{__name__}:failing")
    with caplog.at_level(logging.WARNING):
        assert [custom(policy, {}) for policy in (1, 0, 1)] == [{}, {}, {}]
    (warning,) = caplog.messages
    assert warning.startswith(f"--custom_summaries={__name__}:failing failed (said once): KeyError: ")
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("figures", "must read package.module:function"),
        (":figures", "must read package.module:function"),
        ("no_such_module:f", "failed: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:no_such", "failed: AttributeError: "),
        (f"{__name__}:NUMBER", "is a int, not a function"),
        ("broken_figures:f", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_called_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "broken_figures.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError) as caught:
        CustomSummaries(name)
    assert str(caught.value).startswith(f"--custom_summaries={name} ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
