"""`EmbeddingBag`: results and gradients of `nn.EmbeddingBag` with the same rows; jagged ids; bags in `lookup`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx import ps
from phalanx.errors import ConfigError
from phalanx.ps.client import table_client

DIM, IDS = 3, 8
MODES = ["sum", "mean", "max"]


def pair(dtype, **options):
    """Return an `EmbeddingBag` and torch's, with the same rows."""
    ours = ps.EmbeddingBag(DIM, init=ps.Normal(1.0), **options).to(dtype)
    (rows,) = table_client.current().pull([(ours.handle, np.arange(IDS))])
    theirs = nn.EmbeddingBag(IDS, DIM, _weight=torch.from_numpy(rows).to(dtype), **options)
    return ours, theirs


def row_gradients(module):
    """Return the gradient of each of the rows 0 to IDS - 1, shape (IDS, DIM)."""
    gradient = torch.zeros(IDS, DIM, dtype=torch.float64)
    if module.handle.grad is not None:
        gradient[torch.from_numpy(module.handle._seen.keys)] = module.handle.grad.double()
    return gradient


def assert_same(ours, theirs, arguments, weights):
    """Compare results and all gradients of one call of both."""
    # Of float32 the last bits differ: bags are summed in another order.
    is_double = theirs.weight.dtype is torch.float64
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if is_double else {"rtol": 1.3e-6, "atol": 1e-5}
    gradients = []
    outputs = []
    for module in (ours, theirs):
        leaf = None if weights is None else weights.clone().requires_grad_()
        output = module(*arguments, **({} if leaf is None else {"per_sample_weights": leaf}))
        (output * torch.linspace(0.5, 2.0, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
        outputs.append(output.detach())
        gradients.append(leaf.grad if leaf is not None else torch.zeros(()))
    torch.testing.assert_close(*outputs, **tolerance)
    torch.testing.assert_close(*gradients, **tolerance)
    torch.testing.assert_close(row_gradients(ours), theirs.weight.grad.double(), **tolerance)


@st.composite
def calls(draw):
    """Return options of both modules, arguments of one call, and whether it has weights."""
    mode = draw(st.sampled_from(MODES))
    options = {"mode": mode, "padding_idx": draw(st.sampled_from([None, 2]))}
    options["include_last_offset"] = draw(st.booleans())
    one_id = st.integers(0, IDS - 1)
    if draw(st.booleans()):
        width = draw(st.integers(1, 4))
        rows = draw(st.lists(st.lists(one_id, min_size=width, max_size=width), min_size=1, max_size=4))
        options["include_last_offset"] = False  # torch takes no 2-D ids with it
        arguments = (torch.tensor(rows),)
    else:
        bags = draw(st.lists(st.lists(one_id, max_size=4), min_size=1, max_size=5))
        ends = np.cumsum([0, *map(len, bags)])
        offsets = torch.from_numpy(ends if options["include_last_offset"] else ends[:-1])
        arguments = (torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), offsets)
    return options, arguments, mode == "sum" and draw(st.booleans())


@settings(max_examples=150)
@given(calls(), st.sampled_from([torch.float64, torch.float32]))
def test_results_and_gradients_are_those_of_torch(call, dtype):
    options, arguments, has_weights = call
    ours, theirs = pair(dtype, **options)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(arguments[0].shape, generator=generator, dtype=dtype) if has_weights else None
    assert_same(ours, theirs, arguments, weights)


def test_2d_ids_do_not_need_the_last_offset():
    bag = ps.EmbeddingBag(DIM, include_last_offset=True)
    assert bag(torch.tensor([[1, 2], [3, 4]])).shape == (2, DIM)


def test_the_default_mode_is_torchs_and_the_module_says_its_own():
    assert ps.EmbeddingBag(DIM).mode == nn.EmbeddingBag(1, 1).mode == "mean"
    assert repr(ps.EmbeddingBag(DIM, mode="max", name="tags")) == "EmbeddingBag(3, name='tags', mode='max')"


@pytest.mark.parametrize("mode", MODES)
def test_a_bag_trains_as_torchs_does(mode):
    ours, theirs = pair(torch.float32, mode=mode)
    ids, offsets = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7]), torch.tensor([0, 4, 4])
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            module(ids, offsets).square().sum().backward()
            optimizer.step()
    (rows,) = table_client.current().pull([(ours.handle, np.arange(IDS))])
    torch.testing.assert_close(torch.from_numpy(rows), theirs.weight.detach())


def test_padding_may_be_any_id_and_makes_no_row():
    bag = ps.EmbeddingBag(DIM, padding_idx=-1, init=ps.Constant(1.0), optimizer=ps.SGD(0.5))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    output = bag(torch.tensor([[-1, 5], [-1, -1]]))
    assert output.tolist() == [[1.0] * DIM, [0.0] * DIM]
    output.sum().backward()
    optimizer.step()
    assert table_client.current().mode.store.report()[bag.handle.table].rows == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler's own
def test_a_compiled_bag_has_one_graph_break():
    from torch._dynamo.utils import counters

    ours, theirs = pair(torch.float32, mode="sum")
    counters.clear()
    ours.compile(backend="eager")
    assert_same(ours, theirs, (torch.tensor([1, 2, 2]), torch.tensor([0, 1])), torch.tensor([1.0, 2.0, 3.0]))
    assert len(counters["graph_break"]) == 1


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, ([1, 2],), r"takes ids of shape \(bags, ids per bag\), flat ids with.*found shape \(2,\) without"),
        ({}, ([[1, 2]], [0]), r"found shape \(1, 2\) with offsets"),
        ({}, ([1, 2], [1]), r"offsets must begin at 0, not decrease, and end at 2, the number of ids.*found \[1\]"),
        ({}, ([1, 2], [0, 2, 1]), r"offsets must begin at 0, not decrease"),
        ({}, ([1, 2], [0, 3]), r"end at 2, the number of ids, or before; found \[0, 3\] ... 3"),
        ({"include_last_offset": True}, ([1, 2], [0, 1]), "last of the offsets is the number of ids, 2; found 1"),
        ({"include_last_offset": True}, ([1, 2], []), r"offsets must be a tensor of int64.*shape \(0,\)"),
        ({}, ([1, 2], [[0]]), r"offsets must be a tensor of int64 or int32, of shape \(bags,\)"),
        ({}, ([1, 2], [0.0]), r"found dtype torch.float32 and shape \(1,\)"),
        ({}, ([1, 2], [0], [1.0, 2.0]), r"per_sample_weights need mode='sum'.*has mode='mean'"),
        ({"mode": "sum"}, ([1, 2], [0], [1.0]), r"per_sample_weights have shape \(1,\), and the ids \(2,\)"),
    ],
)
def test_what_does_not_fit_is_an_error(options, arguments, message):
    tensors = [torch.tensor(argument, dtype=None if argument else torch.int64) for argument in arguments]
    with pytest.raises(ConfigError, match=message):
        ps.EmbeddingBag(DIM, **options)(*tensors)


def test_settings_that_cannot_work_name_the_module():
    with pytest.raises(ConfigError, match="mode must be 'sum', 'mean' or 'max', found 'sqrtn'"):
        ps.EmbeddingBag(DIM, mode="sqrtn")
    with pytest.raises(ConfigError, match=r"EmbeddingBag\(dim=0\)"):
        ps.EmbeddingBag(0)
    with pytest.raises(ConfigError, match=r"clicks have shape \(1,\), and the ids \(2,\)"):
        ps.SparseEmbedding(DIM)(torch.tensor([1, 2]), clicks=torch.ones(1))
    with pytest.raises(ConfigError, match="include_last_offset=True; found list"):
        ps.EmbeddingBag(DIM)(torch.tensor([1]), [0])


# --- jagged tensors -------------------------------------------------------------------------------------------------


def jagged(*rows, dtype=torch.int64):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def test_rows_of_jagged_ids_come_back_jagged_as_torchs_do():
    ours = ps.SparseEmbedding(DIM, init=ps.Normal(1.0))
    theirs = nn.Embedding.from_pretrained(ours(torch.arange(IDS)).detach(), freeze=False)
    ids = jagged([1, 2], [], [3, 3, 3])
    outputs = [module(ids) for module in (ours, theirs)]
    for output in outputs:
        assert output.is_nested
        (output * 2).values().sum().backward()
    assert outputs[0].shape == outputs[1].shape, "the same ragged dimension"
    torch.testing.assert_close(outputs[0].values(), outputs[1].values())
    torch.testing.assert_close(row_gradients(ours).float(), theirs.weight.grad)
    weights = jagged([1, 2], [], [3, 3, 3], dtype=torch.float32)
    assert ours(ids).sum(-1).shape[0] == weights.shape[0]


@pytest.mark.parametrize("mode", MODES)
def test_jagged_bags_equal_flat_ids_with_offsets(mode):
    bag = ps.EmbeddingBag(DIM, mode=mode, init=ps.Normal(1.0))
    flat, offsets = torch.tensor([1, 2, 3, 3, 3]), torch.tensor([0, 2, 2])
    assert torch.equal(bag(jagged([1, 2], [], [3, 3, 3])), bag(flat, offsets))
    if mode == "sum":
        weights = jagged([1, 2], [], [3, 4, 5], dtype=torch.float32)
        expected = bag(flat, offsets, torch.tensor([1.0, 2, 3, 4, 5]))
        assert torch.equal(bag(jagged([1, 2], [], [3, 3, 3]), per_sample_weights=weights), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_that_are_not_jagged_are_an_error():
    ids = jagged([1, 2], [3])
    with pytest.raises(ConfigError, match="which has its offsets, and offsets are there too"):
        ps.EmbeddingBag(DIM)(ids, torch.tensor([0]))
    narrowed = torch.nested.narrow(
        torch.arange(6).view(2, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 1]), torch.jagged
    )
    strided = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    for module in (ps.EmbeddingBag(DIM), ps.SparseEmbedding(DIM)):
        with pytest.raises(ConfigError, match="ids are a nested tensor transposed or narrowed, which a table cannot"):
            module(narrowed)
        with pytest.raises(ConfigError, match=r"of layout torch.strided.*layout=torch.jagged"):
            module(strided)


# --- lookup ---------------------------------------------------------------------------------------------------------


def test_one_request_reads_bags_sequences_and_jagged_ids(monkeypatch):
    tags = ps.EmbeddingBag(DIM, mode="sum", name="tags", include_last_offset=True)
    users = ps.SparseEmbedding(2, name="users")
    genres = ps.EmbeddingBag(4, name="genres")
    flat, offsets, weights = torch.tensor([1, 2, 2]), torch.tensor([0, 1, 3]), torch.tensor([0.5, 1.0, 2.0])
    entries = [
        (tags, flat, offsets, weights),
        (users, torch.tensor([[1, 2], [3, 4]])),
        (genres, jagged([5], [6, 7])),
        (users, jagged([1], [9])),
        (tags, flat, {"offsets": offsets, "clicks": torch.ones(3)}),
    ]
    calls = []
    pull = table_client.TableClient.pull
    monkeypatch.setattr(table_client.TableClient, "pull", lambda self, specs: calls.append(specs) or pull(self, specs))
    results = ps.lookup(entries)
    assert [[handle.table for handle, _ in specs] for specs in calls] == [["tags", "users", "genres"]]
    for result, (module, *arguments) in zip(results, entries, strict=True):
        keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
        expected = module(*arguments, **keywords)
        assert result.shape == expected.shape
        assert torch.equal(
            result.values() if result.is_nested else result, expected.values() if expected.is_nested else expected
        )


def several_bags():
    """Return modules of several tables, one of them with padding, and what each looks up."""
    generator = torch.Generator().manual_seed(0)
    bags = [
        ps.EmbeddingBag(width, mode=mode, padding_idx=padding, init=ps.Normal(1.0), seed=width, optimizer=ps.SGD(0.5))
        for width, mode, padding in ((3, "sum", None), (16, "mean", 2), (20, "sum", None), (5, "max", None))
    ]
    entries = [(bag, torch.randint(0, IDS, (6, 4), generator=generator)) for bag in bags]
    sequence = ps.SparseEmbedding(4, init=ps.Normal(1.0))
    return [*entries[:2], (sequence, torch.tensor([[1, 2], [2, 3]])), *entries[2:]]


def keep_gradients(entries, outputs):
    """Return what a network that weighs all outputs leaves in each parameter: ids and gradients."""
    flat = torch.cat([output.reshape(-1) for output in outputs])
    (flat * torch.linspace(-1.0, 2.0, len(flat))).sum().backward()
    kept = [(bag.handle._seen.keys, bag.handle.grad) for bag, _ in entries]
    for bag, _ in entries:
        bag.handle.take_update(None)
    return kept


def test_a_lookup_of_several_tables_has_the_bits_of_a_call_of_each():
    entries = several_bags()
    results, alone = ps.lookup(entries), [module(ids) for module, ids in entries]
    assert all(torch.equal(*pair) for pair in zip(results, alone, strict=True))
    assert results[0].grad_fn is results[1].grad_fn is results[3].grad_fn is not results[2].grad_fn
    for (keys, gradient), (other_keys, other) in zip(
        keep_gradients(entries, results), keep_gradients(entries, alone), strict=True
    ):
        assert keys.tolist() == other_keys.tolist()
        assert gradient.numpy().tobytes() == other.numpy().tobytes()


def test_a_table_whose_result_is_not_used_is_not_trained():
    entries = several_bags()[:2]
    optimizer = torch.optim.SGD([bag.handle for bag, _ in entries], lr=1.0)
    used, _unused = ps.lookup(entries)
    used.sum().backward()
    assert [bag.handle.grad is not None for bag, _ in entries] == [True, False]
    optimizer.step()
    report = table_client.current().mode.store.report()
    assert [report[bag.handle.table].rows for bag, _ in entries] == [len(entries[0][1].unique()), 0]


def test_results_of_a_lookup_may_go_to_losses_of_their_own():
    entries = several_bags()
    for result in ps.lookup(entries):
        result.sum().backward()
    apart = [bag.handle.grad for bag, _ in entries]
    for bag, _ in entries:
        bag.handle.take_update(None)
    torch.cat([result.reshape(-1) for result in ps.lookup(entries)]).sum().backward()
    assert all(torch.equal(bag.handle.grad, gradient) for (bag, _), gradient in zip(entries, apart, strict=True))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("ids", r"entry 1 of a lookup is a str. Give \(embedding, ids\), \(bag, ids, offsets\)"),
        ((torch.tensor([1]),), r"entry 1 of a lookup is \(Tensor\)"),
        ((torch.tensor([1]), 2), r"entry 1 of a lookup is \(Tensor, int\)"),
        ("more", "entry 1 of a lookup gives SparseEmbedding.forward what it does not take: .*takes from 2 to 3"),
        ("name", "what it does not take: .*unexpected keyword argument 'weights'"),
    ],
)
def test_an_entry_that_is_no_lookup_is_named(entry, message):
    embedding, ids = ps.SparseEmbedding(DIM), torch.tensor([1])
    entry = {"more": (embedding, ids, None, ids, ids), "name": (embedding, ids, {"weights": ids})}.get(entry, entry)
    with pytest.raises(ConfigError, match=message):
        ps.lookup([(embedding, ids), entry])
