import os
import resource

import pytest

from appo.utils.system.limits import MANY, limit, num_open, raise_limit

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, NONE), (MANY, NONE)),
        ((1024, 1 << 20), (MANY, 1 << 20)),
        ((1 << 20, 1 << 20), None),
        ((64, 64), None),
        ((NONE, NONE), None),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: before)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    raise_limit()
    assert asked == ([after] if after else [])
    assert limit() == (None if before[0] == NONE else before[0])


def test_open_descriptors_are_counted() -> None:
    before = num_open()
    pipe = os.pipe()
    assert num_open() == before + 2
    for descriptor in pipe:
        os.close(descriptor)
