"""Rows per id and per bag: the values and gradients of torch's gathers, also where the native core sums gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import ConfigError
from phalanx.ps import gathers
from phalanx.ps.features import FeatureRows
from phalanx.ps.gathers import rows_per_bag, rows_per_id
from phalanx.ps.pooling.bags import read_bags

DIM, ROWS = 5, 12


def new_rows():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradient_of(output, rows):
    weights = torch.linspace(-1.0, 2.0, output.numel()).view_as(output)
    (gradient,) = torch.autograd.grad((output * weights).sum(), rows)
    return gradient


def gather(rows, ids):
    """Return the row of each id."""
    return rows_per_id(FeatureRows(rows, ids.reshape(-1), None), ids.shape)


def pool(rows, bags, padding=None):
    """Return the pooled rows of one feature."""
    return rows_per_bag([(FeatureRows(rows, bags.ids.reshape(-1), padding), bags)])[0]


def bags_of(shape, weighted, mode="sum"):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, ROWS, (4, 6) if shape == "2-D" else (24,), generator=generator)
    offsets = {"2-D": None, "first": torch.tensor([0, 9, 9, 20]), "last too": torch.tensor([0, 9, 9, 24])}[shape]
    weights = torch.randn(ids.shape, generator=generator) if weighted else None
    return read_bags(mode, ids, offsets, weights, None, has_last_offset=shape == "last too")


@pytest.mark.parametrize("shape", ["2-D", "first", "last too"])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("padding", [None, 3])
def test_bags_are_those_of_torch(shape, mode, weighted, padding):
    bags = bags_of(shape, weighted, mode)
    rows, theirs = new_rows(), new_rows()
    output = pool(rows, bags, padding)
    expected = F.embedding_bag(
        bags.ids.reshape(-1),
        theirs,
        {"2-D": torch.tensor([0, 6, 12, 18]), "first": torch.tensor([0, 9, 9, 20]), "last too": bags.starts}[shape],
        mode=mode,
        per_sample_weights=None if bags.weights is None else bags.weights.reshape(-1),
        include_last_offset=shape == "last too",
        padding_idx=padding,
    )

    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient_of(output, rows), gradient_of(expected, theirs))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_core_sums_the_gradients_of_bags(mode, monkeypatch):
    bags, rows = bags_of("first", weighted=False, mode=mode), new_rows()
    output = pool(rows, bags)
    gradient = gradient_of(output, rows)
    monkeypatch.setattr(gathers, "HAS_NATIVE", False)
    of_torch = pool(rows, bags)

    assert type(output.grad_fn).__name__ != type(of_torch.grad_fn).__name__ == "EmbeddingBagBackward0"
    torch.testing.assert_close(gradient, gradient_of(of_torch, rows))


def test_bags_without_ids_or_at_all_give_no_gradient():
    rows = new_rows()
    for offsets, count in ((torch.tensor([0, 0]), 2), (torch.tensor([], dtype=torch.int64), 0)):
        bags = read_bags("mean", torch.tensor([], dtype=torch.int64), offsets, None, None, has_last_offset=False)
        output = pool(rows, bags)
        assert output.tolist() == [[0.0] * DIM] * count
        assert not gradient_of(output, rows).any()


def test_weights_that_are_trained_get_their_gradient():
    bags, rows = bags_of("first", weighted=True), new_rows()
    bags.weights.requires_grad_()
    output = pool(rows, bags)
    (gradient,) = torch.autograd.grad(output.sum(), bags.weights)
    torch.testing.assert_close(gradient, rows.detach()[bags.ids].sum(1))


def test_rows_per_id_are_those_of_torch():
    ids, rows, theirs = torch.tensor([[3, 1, 3], [3, 0, 11]]), new_rows(), new_rows()
    output, expected = gather(rows, ids), F.embedding(ids, theirs)

    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient_of(output, rows), gradient_of(expected, theirs))
    assert type(output.grad_fn).__name__ != type(expected.grad_fn).__name__


def test_a_gradient_of_rows_per_id_has_a_gradient():
    ids = torch.tensor([3, 1, 3])
    gradients = []
    for look_up in (gather, lambda rows, ids: F.embedding(ids, rows)):
        rows = new_rows()
        (gradient,) = torch.autograd.grad(look_up(rows, ids).pow(3).sum(), rows, create_graph=True)
        gradients.append(torch.autograd.grad(gradient.square().sum(), rows)[0])
    torch.testing.assert_close(*gradients)


def test_a_gradient_of_bags_has_none_and_says_so():
    bags, rows = bags_of("first", weighted=False), new_rows()
    output = pool(rows, bags)
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def gather_ids(rows):
    return gather(rows, torch.tensor([3, 1, 3]))


def gather_bags(rows):
    return pool(rows, bags_of("2-D", weighted=False, mode="mean"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, whose jacobian of bags is a loop
@pytest.mark.parametrize("look_up", [gather_ids, gather_bags])
def test_functions_of_torch_func_know_the_gradient(look_up):
    rows = new_rows()
    for weights in (torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])):

        def loss(rows, weights=weights):
            return (look_up(rows)[:2] * weights[:, None]).square().sum()

        (expected,) = torch.autograd.grad(loss(rows), rows)
        torch.testing.assert_close(torch.func.grad(loss)(rows), expected)
    jacobian = torch.func.jacrev(look_up)(rows)
    assert jacobian.shape == (*look_up(rows).shape, ROWS, DIM)
    torch.testing.assert_close(jacobian.sum((0, 1)), torch.autograd.grad(look_up(rows).sum(), rows)[0])


@pytest.mark.parametrize("look_up", [gather_ids, gather_bags])
def test_gradients_of_many_outputs_at_once_are_refused_with_a_way_out(look_up):
    rows = new_rows()
    output = look_up(rows)
    with pytest.raises(
        ConfigError, match=r"many outputs at once .* Use torch\.func\.jacrev, or ask for them in a loop"
    ):
        torch.autograd.grad(output, rows, torch.ones(4, *output.shape), is_grads_batched=True)


@pytest.mark.parametrize("has_last_offset", [True, False])
def test_offsets_may_be_used_again_before_the_backward_pass(has_last_offset):
    rows, offsets = new_rows(), torch.tensor([0, 2, 3] if has_last_offset else [0, 2])
    bags = read_bags("sum", torch.tensor([0, 1, 1]), offsets, None, None, has_last_offset=has_last_offset)
    output = pool(rows, bags)
    offsets.numpy()[:] = 10**9
    (gradient,) = torch.autograd.grad(output.sum(), rows)
    assert gradient[:3, 0].tolist() == [1.0, 2.0, 0.0]


def test_weights_that_change_before_the_backward_pass_are_an_error():
    rows, bags = new_rows(), bags_of("first", weighted=True)
    output = pool(rows, bags)
    bags.weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_defaults_of_new_tensors_do_not_count():
    expected = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        rows, bags = new_rows(), bags_of("2-D", weighted=False, mode="mean")
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                output = pool(rows, bags)
                total = output.sum() + gather(rows, bags.ids).sum()
                (gradient,) = torch.autograd.grad(total, rows)
        finally:
            torch.set_default_dtype(torch.float32)
        expected.append(gradient)
    assert all(torch.equal(gradient, expected[0]) for gradient in expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_ids_in_no_bag_make_none(mode, padding):
    for _ in range(50):  # torch would write beyond memory, which not every call shows
        rows = new_rows()
        bags = read_bags(
            mode, torch.tensor([0, 1] * 20), torch.tensor([], dtype=torch.int64), None, None, has_last_offset=False
        )
        output = pool(rows, bags, padding)
        assert output.shape == (0, DIM)
        assert not torch.autograd.grad(output.sum(), rows)[0].any()
        with torch.no_grad():
            assert pool(rows, bags, padding).shape == (0, DIM)


@pytest.mark.parametrize("dim", [1, 4, 8, 12, 15, 16, 32, 300])
def test_rows_of_any_length_are_pooled_as_by_torch(dim):
    rows = torch.randn(9, dim, generator=torch.Generator().manual_seed(dim), requires_grad=True)
    ids, offsets = torch.randint(9, (40,), generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 3, 30])
    bags = read_bags("sum", ids, offsets, None, None, has_last_offset=False)
    expected = F.embedding_bag(ids, rows, offsets, mode="sum")
    (pooled,) = rows_per_bag([(FeatureRows(rows, ids, None), bags)])
    assert torch.equal(pooled, expected)
    assert pooled.grad_fn.name() == "_RowsPerBagBackward"
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    bag_of_id = torch.repeat_interleave(torch.tensor([3, 0, 27, 10]))
    sums = torch.zeros_like(rows).index_add_(0, ids, gradient[bag_of_id])
    assert torch.equal(torch.autograd.grad(pooled, rows, gradient)[0], sums)


@pytest.mark.parametrize("starts", [[0, 10**9], [0, 2, 1], [-1, 3], []])
def test_the_core_refuses_starts_that_lie_outside_the_ids(starts):
    _core = pytest.importorskip("phalanx._core")
    places, values = np.array([0, 1, 1]), np.zeros((2, DIM), np.float32)
    of_bags = np.ones((max(0, len(starts) - 1), DIM), np.float32)
    bags = [
        (np.array([0, 0]), np.array([0, 2]), -1, False, None),
        (places, np.array(starts, np.int64), -1, False, None),
    ]
    message = r"starts of bags|a row of one dim for each bag"
    with pytest.raises(ValueError, match=message):
        _core.add_bag_gradients(bags, [np.ones((1, DIM), np.float32), of_bags], [values, values])
    assert not values.any()
    with pytest.raises(ValueError, match=message):
        _core.pool_bags(bags, [values, values], [np.ones((1, DIM), np.float32), of_bags])
    assert of_bags.all()


# --- several features -----------------------------------------------------------------------------------------------

WIDTHS = (1, 3, 16, 20, 33)


def feature_of(width, number, mode="sum", padding=None, weights=False):
    """Return the rows of a feature and its bags, with values and lengths of its own."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(ROWS, width, generator=generator).requires_grad_()
    lengths = torch.randint(0, 7, (5 + number,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    factors = torch.randn(ids.shape, generator=generator) if weights else None
    return FeatureRows(rows, ids, padding), read_bags(mode, ids, starts, factors, None, has_last_offset=True)


def several_features():
    modes, paddings = ("sum", "mean", "sum", "mean", "sum"), (None, 3, 3, None, None)
    return [feature_of(*of_one) for of_one in zip(WIDTHS, range(5), modes, paddings, strict=True)]


def gradients_of(outputs, features):
    """Return the gradients of the rows of each feature; outputs are used side by side, as a network uses them."""
    flat = torch.cat([output.reshape(-1) for output in outputs])
    weights = torch.randn(flat.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad((flat * weights).sum(), [feature.rows for feature, _ in features])


def one_by_one(features):
    return [rows_per_bag([of_one])[0] for of_one in features]


def summed_in_order(feature, bags, gradient):
    """Return the gradient of rows as single additions of float32, bag after bag."""
    sums = np.zeros(feature.rows.shape, np.float32)
    for bag, (first, last) in enumerate(zip(bags.starts[:-1].tolist(), bags.starts[1:].tolist(), strict=True)):
        places = [place for place in feature.index[first:last].tolist() if place != feature.padding]
        factor = np.float32(1) / np.float32(max(1, len(places))) if bags.mode == "mean" else np.float32(1)
        for place in places:
            sums[place] += factor * gradient[bag].numpy()
    return sums


def test_several_features_have_one_node_with_the_bits_of_a_node_each():
    features = several_features()
    outputs, alone = rows_per_bag(features), one_by_one(features)

    assert len({output.grad_fn for output in outputs}) == 1
    assert all(torch.equal(*pair) for pair in zip(outputs, alone, strict=True))
    gradients = gradients_of(outputs, features)
    for gradient, expected in zip(gradients, gradients_of(alone, features), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("layout", ["whole", "columns of more", "expanded"])
def test_bits_are_those_of_single_additions(width, mode, layout):
    feature, bags = feature_of(width, 7, mode, padding=3)
    (output,) = rows_per_bag([(feature, bags)])
    expected = F.embedding_bag(
        feature.index, feature.rows, bags.starts, mode=mode, include_last_offset=True, padding_idx=3
    )
    gradient = {
        "whole": torch.randn(output.shape),
        "columns of more": torch.randn(len(output), width + 5)[:, 2 : 2 + width],
        "expanded": torch.tensor(0.3).expand(output.shape),
    }[layout]

    assert torch.equal(output, expected)
    (of_rows,) = torch.autograd.grad(output, feature.rows, gradient)
    assert of_rows.numpy().tobytes() == summed_in_order(feature, bags, gradient).tobytes()


def test_features_that_share_rows_add_up_as_with_a_node_each():
    rows = feature_of(16, 0)[0].rows
    features = [(FeatureRows(rows, f.index, None), bags) for f, bags in (feature_of(16, number) for number in range(4))]
    weights = [torch.randn(len(bags.starts) - 1, 16) for _, bags in features]
    gradients = []
    for outputs in (rows_per_bag(features), one_by_one(features)):
        total = torch.cat([output * w for output, w in zip(outputs, weights, strict=True)]).sum()
        gradients.append(torch.autograd.grad(total, rows)[0])
    assert gradients[0].numpy().tobytes() == gradients[1].numpy().tobytes()


def test_rows_of_an_output_that_is_not_used_get_no_gradient():
    features = several_features()
    outputs = rows_per_bag(features)
    (outputs[0].sum() + outputs[3].sum()).backward()
    assert [feature.rows.grad is not None for feature, _ in features] == [True, False, False, True, False]


def test_outputs_may_have_their_backward_passes_one_after_the_other():
    features, expected = several_features(), several_features()
    for output in rows_per_bag(features):
        output.square().sum().backward()
    torch.cat([output.square().reshape(-1) for output in rows_per_bag(expected)]).sum().backward()
    for (feature, _), (other, _) in zip(features, expected, strict=True):
        assert torch.equal(feature.rows.grad, other.rows.grad)


def test_an_output_may_be_used_twice():
    features = several_features()
    outputs, alone = rows_per_bag(features), one_by_one(features)
    gradients = [
        torch.autograd.grad(sum((2 * o + o.square()).sum() for o in of_all), [f.rows for f, _ in features])
        for of_all in (outputs, alone)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_results_come_in_the_order_of_the_features_whatever_pools_them():
    kinds = [("max", False), ("sum", False), ("sum", True), ("mean", False), ("sum", True), ("max", False)]
    features = [feature_of(4, number, mode, weights=weighted) for number, (mode, weighted) in enumerate(kinds)]
    features[4][1].weights.requires_grad_()
    outputs = rows_per_bag(features)
    for output, (feature, bags) in zip(outputs, features, strict=True):
        expected = F.embedding_bag(
            feature.index,
            feature.rows,
            bags.starts,
            mode=bags.mode,
            per_sample_weights=bags.weights,
            include_last_offset=True,
        )
        assert torch.equal(output, expected)
    assert [output.grad_fn.name() for output in outputs].count("EmbeddingBagBackward0") == 3
    assert outputs[1].grad_fn is outputs[3].grad_fn is not outputs[2].grad_fn


def test_weights_that_change_are_an_error_for_their_output_alone():
    features = [feature_of(4, 0), feature_of(4, 1, weights=True)]
    plain, weighted = rows_per_bag(features)
    features[1][1].weights.zero_()
    plain.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted.sum().backward()


def test_results_may_change_in_place():
    features = several_features()
    first, *others = rows_per_bag(features)
    (first.relu_() + others[0].sum()).sum().backward()
    assert features[0][0].rows.grad.any()
