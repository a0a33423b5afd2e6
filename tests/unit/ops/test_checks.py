import re

import pytest
import torch

from appo.algorithms.ops.checks import require_same_shape, require_shape


def test_right_shapes_pass() -> None:
    require_shape("x", torch.zeros(2, 3), (2, 3))
    require_shape("x", torch.zeros(2, 3), torch.Size([2, 3]))
    require_shape("x", torch.zeros(2, 3), [None, 3])
    require_shape("x", torch.zeros(()), ())
    require_same_shape(x=torch.zeros(2), y=torch.ones(2), z=torch.ones(2))


@pytest.mark.parametrize(
    ("expected", "written"), [((2, 4), "[2, 4]"), ((None, 4), "[any, 4]"), ((2,), "[2]"), ((2, 3, 1), "[2, 3, 1]")]
)
def test_wrong_shape_names_tensor_expected_and_got(expected: tuple[int | None, ...], written: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"reward: expected shape {written}, got [2, 3]")):
        require_shape("reward", torch.zeros(2, 3), expected)


def test_different_shapes_name_both_tensors() -> None:
    with pytest.raises(ValueError, match=r"value: expected shape \[2, 3\] as reward has, got \[3, 3\]"):
        require_same_shape(reward=torch.zeros(2, 3), ratio=torch.zeros(2, 3), value=torch.zeros(3, 3))
