"""Rows per id and per bag: the values and gradients of torch's gathers, also where the native core sums gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import ConfigError
from phalanx.ps import gathers
from phalanx.ps.gathers import rows_per_bag, rows_per_id
from phalanx.ps.pooling.bags import read_bags

DIM, ROWS = 5, 12


def new_rows():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradient_of(output, rows):
    weights = torch.linspace(-1.0, 2.0, output.numel()).view_as(output)
    (gradient,) = torch.autograd.grad((output * weights).sum(), rows)
    return gradient


def bags_of(shape, weighted):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, ROWS, (4, 6) if shape == "2-D" else (24,), generator=generator)
    offsets = {"2-D": None, "first": torch.tensor([0, 9, 9, 20]), "last too": torch.tensor([0, 9, 9, 24])}[shape]
    weights = torch.randn(ids.shape, generator=generator) if weighted else None
    return read_bags(ids, offsets, weights, None, has_last_offset=shape == "last too")


@pytest.mark.parametrize("shape", ["2-D", "first", "last too"])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("padding", [None, 3])
def test_bags_are_those_of_torch(shape, mode, weighted, padding):
    bags = bags_of(shape, weighted)
    rows, theirs = new_rows(), new_rows()
    output = rows_per_bag(rows, bags.ids, bags, mode, padding)
    expected = F.embedding_bag(
        bags.ids,
        theirs,
        bags.offsets,
        mode=mode,
        per_sample_weights=bags.weights,
        include_last_offset=bags.has_last_offset,
        padding_idx=padding,
    )

    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient_of(output, rows), gradient_of(expected, theirs))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_core_sums_the_gradients_of_bags(mode, monkeypatch):
    bags, rows = bags_of("first", weighted=False), new_rows()
    output = rows_per_bag(rows, bags.ids, bags, mode, None)
    gradient = gradient_of(output, rows)
    monkeypatch.setattr(gathers, "HAS_NATIVE", False)
    of_torch = rows_per_bag(rows, bags.ids, bags, mode, None)

    assert type(output.grad_fn).__name__ != type(of_torch.grad_fn).__name__ == "EmbeddingBagBackward0"
    torch.testing.assert_close(gradient, gradient_of(of_torch, rows))


def test_bags_without_ids_or_at_all_give_no_gradient():
    rows = new_rows()
    for offsets, count in ((torch.tensor([0, 0]), 2), (torch.tensor([], dtype=torch.int64), 0)):
        bags = read_bags(torch.tensor([], dtype=torch.int64), offsets, None, None, has_last_offset=False)
        output = rows_per_bag(rows, bags.ids, bags, "mean", None)
        assert output.tolist() == [[0.0] * DIM] * count
        assert not gradient_of(output, rows).any()


def test_weights_that_are_trained_get_their_gradient():
    bags, rows = bags_of("first", weighted=True), new_rows()
    bags.weights.requires_grad_()
    output = rows_per_bag(rows, bags.ids, bags, "sum", None)
    (gradient,) = torch.autograd.grad(output.sum(), bags.weights)
    torch.testing.assert_close(gradient, rows.detach()[bags.ids].sum(1))


def test_rows_per_id_are_those_of_torch():
    ids, rows, theirs = torch.tensor([[3, 1, 3], [3, 0, 11]]), new_rows(), new_rows()
    output, expected = rows_per_id(rows, ids, None), F.embedding(ids, theirs)

    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient_of(output, rows), gradient_of(expected, theirs))
    assert type(output.grad_fn).__name__ != type(expected.grad_fn).__name__


def test_a_gradient_of_rows_per_id_has_a_gradient():
    ids = torch.tensor([3, 1, 3])
    gradients = []
    for gather in (lambda rows: rows_per_id(rows, ids, None), lambda rows: F.embedding(ids, rows)):
        rows = new_rows()
        (gradient,) = torch.autograd.grad(gather(rows).pow(3).sum(), rows, create_graph=True)
        gradients.append(torch.autograd.grad(gradient.square().sum(), rows)[0])
    torch.testing.assert_close(*gradients)


def test_a_gradient_of_bags_has_none_and_says_so():
    bags, rows = bags_of("first", weighted=False), new_rows()
    output = rows_per_bag(rows, bags.ids, bags, "sum", None)
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def gather_ids(rows):
    return rows_per_id(rows, torch.tensor([3, 1, 3]), None)


def gather_bags(rows):
    bags = bags_of("2-D", weighted=False)
    return rows_per_bag(rows, bags.ids, bags, "mean", None)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, whose jacobian of bags is a loop
@pytest.mark.parametrize("gather", [gather_ids, gather_bags])
def test_functions_of_torch_func_know_the_gradient(gather):
    rows = new_rows()
    for weights in (torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])):

        def loss(rows, weights=weights):
            return (gather(rows)[:2] * weights[:, None]).square().sum()

        (expected,) = torch.autograd.grad(loss(rows), rows)
        torch.testing.assert_close(torch.func.grad(loss)(rows), expected)
    jacobian = torch.func.jacrev(gather)(rows)
    assert jacobian.shape == (*gather(rows).shape, ROWS, DIM)
    torch.testing.assert_close(jacobian.sum((0, 1)), torch.autograd.grad(gather(rows).sum(), rows)[0])


@pytest.mark.parametrize("gather", [gather_ids, gather_bags])
def test_gradients_of_many_outputs_at_once_are_refused_with_a_way_out(gather):
    rows = new_rows()
    output = gather(rows)
    with pytest.raises(
        ConfigError, match=r"many outputs at once .* Use torch\.func\.jacrev, or ask for them in a loop"
    ):
        torch.autograd.grad(output, rows, torch.ones(4, *output.shape), is_grads_batched=True)


@pytest.mark.parametrize("has_last_offset", [True, False])
def test_offsets_may_be_used_again_before_the_backward_pass(has_last_offset):
    rows, offsets = new_rows(), torch.tensor([0, 2, 3] if has_last_offset else [0, 2])
    bags = read_bags(torch.tensor([0, 1, 1]), offsets, None, None, has_last_offset=has_last_offset)
    output = rows_per_bag(rows, bags.ids, bags, "sum", None)
    offsets.numpy()[:] = 10**9
    (gradient,) = torch.autograd.grad(output.sum(), rows)
    assert gradient[:3, 0].tolist() == [1.0, 2.0, 0.0]


def test_weights_that_change_before_the_backward_pass_are_an_error():
    rows, bags = new_rows(), bags_of("first", weighted=True)
    output = rows_per_bag(rows, bags.ids, bags, "sum", None)
    bags.weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_defaults_of_new_tensors_do_not_count():
    expected = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        rows, bags = new_rows(), bags_of("2-D", weighted=False)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                output = rows_per_bag(rows, bags.ids, bags, "mean", None)
                total = output.sum() + rows_per_id(rows, bags.ids, None).sum()
                (gradient,) = torch.autograd.grad(total, rows)
        finally:
            torch.set_default_dtype(torch.float32)
        expected.append(gradient)
    assert all(torch.equal(gradient, expected[0]) for gradient in expected)


def test_ids_in_no_bag_make_none():
    rows = new_rows()
    bags = read_bags(torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64), None, None, has_last_offset=False)
    output = rows_per_bag(rows, bags.ids, bags, "sum", None)
    assert output.shape == (0, DIM)
    assert not torch.autograd.grad(output.sum(), rows)[0].any()


@pytest.mark.parametrize("starts", [[0, 10**9], [0, 2, 1], [-1, 3], []])
def test_the_core_refuses_starts_that_lie_outside_the_ids(starts):
    _core = pytest.importorskip("phalanx._core")
    places, sums = np.array([0, 1, 1]), np.zeros((2, DIM), np.float32)
    gradients = np.ones((max(0, len(starts) - 1), DIM), np.float32)
    with pytest.raises(ValueError, match=r"starts of bags|a gradient for each bag"):
        _core.add_bag_gradients(places, np.array(starts, np.int64), None, -1, False, gradients, sums)
    assert not sums.any()
