import torch
from torch import nn

from appo.algorithms.models.flat_module import FlatModule, split


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(5.0))
        self.register_buffer("calls", torch.tensor(3))  # an integer is no weight
        self.layer = nn.Linear(2, 3)
        self.bias = nn.Parameter(torch.tensor([7.0]))


def test_parameters_come_first_and_buffers_last() -> None:
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatModule(module)
    assert flat.table == [("bias", (1,)), ("layer.weight", (3, 2)), ("layer.bias", (3,)), ("scale", ())]
    assert flat.num_parameters == 10
    assert flat.flat.shape == (11,)
    assert flat.flat[0] == 7.0
    assert flat.flat[-1] == 5.0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_copies_in_another_type_follow_what_is_loaded() -> None:
    module = Small()
    flat = FlatModule(module)
    flat.compute_with_copies(module.layer.parameters(), torch.bfloat16)
    weights = torch.arange(11.0) + 0.001
    flat.load(weights.numpy())
    assert torch.equal(flat.flat, weights)  # not rounded
    assert module.layer.weight.dtype == module.layer.bias.dtype == torch.bfloat16
    assert module.layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert module.bias.item() == weights[0]


def test_copies_of_kernels_have_their_channels_last() -> None:
    module = nn.Conv2d(2, 3, (1, 2))
    flat = FlatModule(module)
    flat.compute_with_copies(module.parameters(), torch.bfloat16)
    flat.load(torch.arange(15.0).numpy())
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert not flat.flat[:12].view(3, 2, 1, 2).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module.weight, torch.arange(12.0).view(3, 2, 1, 2))


def test_vector_and_module_are_one_memory() -> None:
    module = Small()
    flat = FlatModule(module)
    flat.flat.copy_(torch.arange(11.0))
    assert module.bias.tolist() == [0.0]
    assert module.layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert module.layer.bias.tolist() == [7.0, 8.0, 9.0]
    assert module.scale.item() == 10.0
    assert module.calls.item() == 3
    module.load_state_dict({**module.state_dict(), "scale": torch.tensor(-1.0)})
    assert flat.flat[-1] == -1.0


def test_module_computes_with_the_vector_and_still_has_gradients() -> None:
    flat = FlatModule(Small())
    flat.flat.fill_(1.0)
    output = flat.module.layer(torch.tensor([2.0, 3.0]))  # type: ignore[operator]
    output.sum().backward()
    assert output.tolist() == [6.0, 6.0, 6.0]
    assert flat.module.layer.weight.grad.tolist() == [[2.0, 3.0]] * 3  # type: ignore[union-attr]


def test_split_gives_views_of_all_shapes() -> None:
    flat = torch.arange(8.0)
    views = split(flat, [("a", (2, 2)), ("b", ()), ("c", (0, 4)), ("d", (3,))])
    assert [tuple(v.shape) for v in views] == [(2, 2), (), (0, 4), (3,)]
    views[3][0] = -1.0
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, -1.0, 6.0, 7.0]
