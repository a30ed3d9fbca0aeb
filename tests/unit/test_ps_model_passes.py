"""The first lookup of a forward pass pulls the rows of the others, and never changes what a model computes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from phalanx import ps
from phalanx.ps.argument_view import tensors_in, view_in
from phalanx.ps.client.consistency import AsyncMode, ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.client.table_client import current
from phalanx.ps.model_passes import ModelPasses
from phalanx.ps.stores.local import LocalStore

TABLES, DIM, ROWS = 4, 2, 5


class Counting(LocalStore):
    """Tables in this process, and the tables of each pull."""

    def __init__(self):
        super().__init__()
        self.pulls = []

    def pull(self, pull_specs, *, step=0):
        self.pulls.append([spec.table for spec in pull_specs])
        return super().pull(pull_specs, step=step)


class Tower(nn.Module):
    """Looks up each column of its ids with a module of its own, and bags from a dict."""

    def __init__(self, name="t", same=False):
        super().__init__()
        tables = [f"{name}{0 if same else i}" for i in range(TABLES)]
        self.columns = nn.ModuleList(
            ps.SparseEmbedding(DIM, name=table, optimizer=ps.SGD(0.1), init=ps.Normal(1.0)) for table in tables
        )
        self.tags = ps.EmbeddingBag(
            DIM, name=f"{name} tags", optimizer=ps.SGD(0.1), mode="sum", include_last_offset=True, init=ps.Normal(1.0)
        )
        self.before = lambda number: None
        self.order = range(TABLES)
        self.is_shifted = False

    def forward(self, ids, *, batch):
        total = self.tags(batch["tags"], batch["offsets"]).sum()
        for number in self.order:
            self.before(number)
            column = ids[:, number] + 1 if self.is_shifted else ids[:, number]
            total = total + (number + 1) * self.columns[number](column).square().sum()
        return total


def batch_of(step, rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tags = torch.randint(9, (int(offsets[-1]),), generator=generator)
    return torch.randint(9, (rows, TABLES), generator=generator), {"tags": tags, "offsets": offsets}


def passes_of(model, steps, rows=lambda step: ROWS, mode=AsyncMode):
    """Return what a model computes in some steps, and the pulls of each."""
    store = Counting()
    current()._mode = mode(store)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    outputs, pulls = [], []
    for step in range(steps):
        store.pulls.clear()
        ids, batch = batch_of(step, rows(step))
        output = model(ids, batch=batch)
        pulls.append(list(store.pulls))
        output.backward()
        optimizer.step()
        outputs.append(output.item())
    return outputs, pulls


def expected_of(steps, name, rows=lambda step: ROWS, mode=AsyncMode, **options):
    """Return what a model computes whose lookups each make a request; it has tables of the same first rows."""
    outputs, pulls = passes_of(Tower(name, **options), steps, rows, mode)
    assert mode is not AsyncMode or [len(of_step) for of_step in pulls] == [TABLES + 1] * steps
    current()._mode = None
    current().registry._rules.clear()
    return outputs


def test_from_the_third_pass_on_one_request_reads_all_tables():
    expected = expected_of(6, "t")
    model = Tower("t")
    ModelPasses(model)
    outputs, pulls = passes_of(model, 6)
    assert outputs == expected
    assert [len(of_step) for of_step in pulls] == [5, 5, 1, 1, 1, 1]
    assert pulls[-1] == [["t tags", "t0", "t1", "t2", "t3"]]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    "mode", [ConsistencyMode, lambda s: HalfAsyncMode(s, steps=2), lambda s: GeoMode(s, steps=3, workers=1)]
)
def test_every_mode_computes_the_same_with_fewer_requests(mode, same):
    expected = expected_of(6, "t", mode=mode, same=same)
    model = Tower("t", same=same)
    ModelPasses(model)
    outputs, pulls = passes_of(model, 6, mode=mode)
    assert outputs == expected
    assert all(len(of_step) <= 1 for of_step in pulls[2:])


def test_a_table_of_several_modules_is_pulled_once_and_each_trains_as_before():
    expected = expected_of(5, "t", same=True)
    model = Tower("t", same=True)
    ModelPasses(model)
    outputs, pulls = passes_of(model, 5)
    assert outputs == expected
    assert pulls[-1] == [["t tags", "t0"]]


def test_batches_of_other_lengths_are_one_request_too():
    def rows(step):
        return ROWS - step

    expected = expected_of(5, "t", rows)
    model = Tower("t")
    ModelPasses(model)
    outputs, pulls = passes_of(model, 5, rows)
    assert outputs == expected
    assert [len(of_step) for of_step in pulls] == [5, 5, 1, 1, 1]


def test_ids_that_a_model_changes_before_a_lookup_get_their_own_rows():
    class Changing(Tower):
        def forward(self, ids, *, batch):
            total = super().forward(ids, batch=batch)
            batch["tags"].add_(1)
            return total + super().forward(ids, batch=batch)

    expected = outputs_of(Changing("t"), 5)
    current()._mode = None
    current().registry._rules.clear()
    model = Changing("t")
    ModelPasses(model)
    assert outputs_of(model, 5) == expected


def outputs_of(model, steps):
    outputs, _ = passes_of(model, steps)
    return outputs


def test_a_sparse_argument_has_no_ids():
    class WithSparse(Tower):
        def forward(self, adjacency, ids, *, batch):
            return super().forward(ids, batch=batch) + adjacency.to_dense().sum()

    model = WithSparse("sparse")
    ModelPasses(model)
    ids, batch = batch_of(0)
    current()._mode = AsyncMode(store := Counting())
    for _ in range(3):
        model(torch.eye(3).to_sparse(), ids, batch=batch)
    assert len(store.pulls[-1]) == TABLES + 1


def test_ids_that_are_computed_are_pulled_by_themselves():
    expected_of(2, "other")
    model = Tower("t")
    ModelPasses(model)
    model.is_shifted = True
    _, pulls = passes_of(model, 4)
    assert [len(of_step) for of_step in pulls] == [5, 5, 5, 5]


def test_ids_that_change_within_a_pass_are_pulled_again():
    model = Tower("t")
    ModelPasses(model)
    passes_of(model, 3)
    ids, batch = batch_of(7)
    store = current().mode.store
    store.pulls.clear()

    def before(number):
        if number == 2:
            ids[:, 2] += 1

    model.before = before
    output = model(ids, batch=batch)
    assert store.pulls == [["t tags", "t0", "t1", "t2", "t3"], ["t2"]]
    model.before = lambda number: None
    assert output.item() == Tower("t")(ids, batch=batch).item()


def test_rows_that_this_process_pushed_within_a_pass_are_pulled_again():
    model = Tower("t")
    ModelPasses(model)
    passes_of(model, 3)
    ids, batch = batch_of(7)
    store = current().mode.store
    store.pulls.clear()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)

    def before(number):
        if number == 2:
            model.columns[2].handle.grad = None
            with torch.enable_grad():
                nn.Module.__call__(model.columns[2], ids[:, 2]).sum().backward()
            optimizer.step()

    # A nested lookup of table 2 takes the first rows of it; the lookup that follows has to see the push.
    model.before = before
    value = model(ids, batch=batch)
    model.before = lambda number: None
    plain = Tower("t")
    expected = plain(ids, batch=batch)
    assert value.item() == expected.item()
    assert store.pulls[1] == ["t2", "t3"]


def test_calls_that_a_pass_leaves_out_or_adds_cost_no_more_requests_than_calls():
    model = Tower("t")
    ModelPasses(model)
    passes_of(model, 3)
    store = current().mode.store
    for order, requests in (([], 1), ([3, 0], 3), ([3, 0], 1), ([0, 0, 1], 3), ([3, 2, 1, 0], 3), ([3, 2, 1, 0], 1)):
        model.order = order
        ids, batch = batch_of(9)
        store.pulls.clear()
        value = model(ids, batch=batch).item()
        assert len(store.pulls) == requests <= len(order) + 1
        assert value == reference(order, ids, batch)


def reference(order, ids, batch):
    plain = Tower("t")
    plain.order = order
    return plain(ids, batch=batch).item()


def test_rows_asked_ahead_are_taken_by_the_whole_pass():
    model = Tower("t")
    ModelPasses(model)
    passes_of(model, 4)
    store = current().mode.store
    batches = [batch_of(step) for step in range(20, 24)]

    def lookups(batch):
        ids, bags = batch
        return [(model.tags, bags["tags"], bags["offsets"]), *zip(model.columns, ids.unbind(1), strict=True)]

    store.pulls.clear()
    for ids, batch in ps.prefetch(batches, lookups):
        model(ids, batch=batch)
    assert len(store.pulls) == len(batches), "one request ahead for each batch, and none in its pass"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler's own
def test_a_compiled_model_is_not_followed_and_breaks_no_more_graphs():
    from torch._dynamo.utils import counters

    breaks = []
    for is_followed in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(ps.SparseEmbedding(DIM, name="ids", optimizer=ps.SGD(0.1)), nn.Linear(DIM, 1))
        if is_followed:
            ModelPasses(model)
        counters.clear()
        model.compile(backend="eager")
        for _ in range(3):
            model(torch.arange(3)).sum().backward()
        breaks.append(sum(counters["graph_break"].values()))
    assert 0 < breaks[1] <= breaks[0]
    assert current().model_passes == []


def test_a_pass_that_fails_leaves_no_rows_behind():
    model = Tower("t")
    ModelPasses(model)
    passes_of(model, 3)

    def before(number):
        if number == 1:
            raise RuntimeError("stop")

    model.before = before
    ids, batch = batch_of(3)
    with pytest.raises(RuntimeError, match="stop"):
        model(ids, batch=batch)
    assert current().model_passes == []


def test_a_model_within_a_model_follows_its_own_arguments():
    model = Tower("t")
    ModelPasses(model)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids, *, batch):
            return self.inner(ids.clone(), batch=batch)

    outer = Outer()
    ModelPasses(outer)
    _, pulls = passes_of(outer, 4)
    assert [len(of_step) for of_step in pulls] == [5, 5, 1, 1]


def test_models_that_are_followed_can_be_copied_and_pickled():
    model = nn.Sequential(ps.SparseEmbedding(DIM, name="ids", optimizer=ps.SGD(0.1)))
    ModelPasses(model)
    for _ in range(3):
        model(torch.arange(3))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.arange(4)), model(torch.arange(4)))
    assert current().model_passes == []


# --- views ----------------------------------------------------------------------------------------------------------

WHOLE_COLUMNS = [
    lambda x: x,
    lambda x: x[:, 2],
    lambda x: x[:, 1:3],
    lambda x: x.unbind(1)[3],
    lambda x: x[:, 0:1],
    lambda x: x.T[2],
    lambda x: x.split(2, 1)[1],
    lambda x: x.view(-1, 2, 2)[:, 1],
]
SOME_ROWS = [lambda x: x[:2], lambda x: x[::2, 1], lambda x: x[4:], lambda x: x[3]]


@pytest.mark.parametrize("view", WHOLE_COLUMNS + SOME_ROWS)
def test_a_view_is_found_in_the_next_argument_with_as_many_rows(view):
    first, second = torch.arange(24).view(6, 4), torch.arange(100, 124).view(6, 4)
    place = view_in((0,), first, view(first))
    assert torch.equal(place.of(second), view(second))


@pytest.mark.parametrize("view", WHOLE_COLUMNS)
def test_columns_are_found_in_arguments_of_any_length(view):
    first, longer = torch.arange(24).view(6, 4), torch.arange(200, 232).view(8, 4)
    place = view_in((0,), first, view(first))
    for other in (longer, longer[:3], longer[1:2], longer[:0]):
        assert torch.equal(place.of(other), view(other))


@pytest.mark.parametrize("view", SOME_ROWS)
def test_rows_beyond_the_argument_are_not_read(view):
    first = torch.arange(24).view(6, 4)
    place = view_in((0,), first, view(first))
    assert place.of(first[:1]) is None or place.of(first[:1]).numel() == 0


def test_an_argument_of_another_kind_has_no_such_view():
    place = view_in((0,), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64))
    for other in (torch.zeros(3, 5).long(), torch.zeros(3, 4), torch.zeros(4, 3).long().T, torch.tensor(1)):
        assert place.of(other) is None


def test_tensors_are_found_in_what_models_take():
    jagged = torch.nested.nested_tensor([[1, 2], [3]], dtype=torch.int64, layout=torch.jagged)
    ones = torch.ones(2)
    nested = {"a": [ones, "text", (1, {"b": jagged})], "c": None}
    found = dict(tensors_in(nested))
    assert list(found) == [("a", 0), ("a", 2, 1, "b")]
    assert found[("a", 2, 1, "b")].tolist() == [1, 2, 3]
