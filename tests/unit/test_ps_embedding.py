"""`SparseEmbedding` in one process: equal to torch's embedding on the same rows, under every way to train."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx import fleet, ps
from phalanx.errors import ClosedError, ConfigError
from phalanx.ps.client import table_client

DIM, IDS = 3, 8


class Model(nn.Module):
    """A sparse part and a dense one over the same step."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        torch.manual_seed(1)
        self.head = nn.Linear(DIM, 2)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def batches(steps=6, size=5):
    # Every id in every batch, so that rules with momentum agree with torch's dense update of all rows.
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.cat([torch.arange(IDS), torch.randint(IDS, (size,), generator=generator)])


def rows_of(embedding):
    with torch.no_grad():
        return embedding(torch.arange(IDS)).clone()


def pair(**settings):
    """Return a model over a table and the same model over torch's embedding, with the same values."""
    sparse = Model(ps.SparseEmbedding(DIM, init=ps.Normal(1.0), **settings))
    dense = Model(nn.Embedding(IDS, DIM))
    dense.load_state_dict({"embedding.weight": rows_of(sparse.embedding), **sparse.state_dict()})
    return sparse, dense


def step(model, optimizer, ids, scale=1.0):
    optimizer.zero_grad()
    loss = model(ids).square().mean() * scale
    loss.backward()
    optimizer.step()
    return loss


RULES = [
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01}),
]


@pytest.mark.parametrize(("kind", "settings"), RULES)
def test_a_plain_script_trains_a_table_as_torch_trains_an_embedding(kind, settings):
    sparse, dense = pair()
    optimizers = [kind(m.parameters(), **settings) for m in (sparse, dense)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    for ids in batches():
        losses = [step(m, o, ids) for m, o in zip((sparse, dense), optimizers, strict=True)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sparse.head.weight, dense.head.weight, rtol=1e-5, atol=1e-6)


def test_a_table_with_its_own_rule_does_not_follow_the_optimizer():
    sparse, dense = pair(optimizer=ps.Adagrad(0.5))
    one = torch.optim.SGD(sparse.parameters(), lr=0.1)
    other = torch.optim.SGD(dense.head.parameters(), lr=0.1)
    adagrad = torch.optim.Adagrad(dense.embedding.parameters(), lr=0.5)
    for ids in batches():
        step(sparse, one, ids)
        adagrad.zero_grad()
        step(dense, other, ids)
        adagrad.step()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_with_its_own_rule_needs_no_place_in_an_optimizer():
    sparse, dense = pair(optimizer=ps.SGD(0.5))
    optimizer = torch.optim.SGD(sparse.head.parameters(), lr=0.1)
    other = torch.optim.SGD(
        [{"params": dense.head.parameters()}, {"params": dense.embedding.parameters(), "lr": 0.5}], 0.1
    )
    for ids in batches(2):
        step(sparse, optimizer, ids)
        step(dense, other, ids)
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_that_nobody_updates_is_an_error_or_in_a_plain_script_a_warning(caplog):
    sparse, _ = pair()
    optimizer = torch.optim.SGD(sparse.head.parameters(), lr=0.1)
    ids = next(batches())
    for _ in range(3):
        step(sparse, optimizer, ids)
    assert caplog.text.count("is in no optimizer, so nothing says how its rows are updated") == 1
    fleet.distributed_optimizer(optimizer)
    with pytest.raises(
        ConfigError, match=r"the parameter of table 'embedding.*' is in no optimizer.*Give the optimizer"
    ):
        step(sparse, optimizer, ids)


def test_a_model_of_sparse_rows_only_trains():
    embedding = ps.SparseEmbedding(DIM)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = rows_of(embedding)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    moved = (before - rows_of(embedding)).sum(1)
    torch.testing.assert_close(moved, torch.tensor([0, 2, 1.0, 0, 0, 0, 0, 0]) * DIM, rtol=1e-5, atol=1e-5)


# --- ways to train --------------------------------------------------------------------------------------------------


def test_accumulated_and_clipped_gradients_are_those_of_torch():
    sparse, dense = pair()
    norms = []
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for ids in batches(3):
            optimizer.zero_grad()
            for part in (ids[:4], ids[2:]):
                model(part).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7))
            optimizer.step()
    torch.testing.assert_close(norms[:3], norms[3:])
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)


def test_several_lookups_of_a_table_in_one_step_add_up():
    sparse, dense = pair()
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        (model(torch.tensor([0, 1])).sum() * 2 + model(torch.tensor([[1, 2], [3, 1]])).square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_drops_what_was_not_stepped(to_none):
    sparse, _ = pair()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    before = rows_of(sparse.embedding)
    sparse(torch.tensor([0])).sum().backward()
    optimizer.zero_grad(set_to_none=to_none)
    sparse(torch.tensor([1])).sum().backward()
    optimizer.step()
    moved = (rows_of(sparse.embedding) != before).any(1)
    assert moved.tolist() == [False, True] + [False] * 6


def test_gradient_scaling_unscales_and_skips():
    sparse, dense = pair()
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, ids in enumerate(batches(4)):
            optimizer.zero_grad()
            loss = model(ids).square().mean() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-4, atol=1e-5)
    assert (table_client.current().skipped, table_client.current().mode.step) == (1, 4), "a skipped step ends too"


def test_a_gradient_that_is_not_finite_sends_nothing_and_is_counted(caplog):
    sparse, _ = pair()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    before = rows_of(sparse.embedding)
    step(sparse, optimizer, torch.arange(3), scale=float("nan"))
    assert torch.equal(rows_of(sparse.embedding), before)
    assert table_client.current().skipped == 1
    assert "step 0 sent nothing to the tables: a gradient is not finite (1 so far)" in caplog.text


def test_bfloat16_autocast_trains():
    sparse, dense = pair()
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for ids in batches(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_module_computes_in_its_dtype(dtype):
    sparse = Model(ps.SparseEmbedding(DIM)).to(dtype)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    before = rows_of(sparse.embedding)
    out = sparse.embedding(torch.arange(2))
    assert out.dtype is dtype
    out.sum().backward()
    assert sparse.embedding.handle.grad.dtype is dtype
    optimizer.step()
    torch.testing.assert_close(rows_of(sparse.embedding)[:2], before[:2] - 0.5, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler's own
def test_a_compiled_model_has_one_graph_break_and_trains_the_same():
    from torch._dynamo.utils import counters

    sparse, dense = pair()
    counters.clear()
    sparse.compile(backend="eager")
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for ids in batches(3):
            step(model, optimizer, ids)
    assert len(counters["graph_break"]) == 1
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)


# --- lookups --------------------------------------------------------------------------------------------------------


def test_ids_of_any_shape_and_value():
    embedding = ps.SparseEmbedding(DIM)
    ids = torch.tensor([[[2**63 - 1, -(2**63)]], [[0, -1]]])
    out = embedding(ids)
    assert out.shape == (2, 1, 2, DIM)
    assert torch.equal(embedding(ids.flatten()), out.view(4, DIM))
    assert embedding(torch.empty(0, 4, dtype=torch.int32)).shape == (0, 4, DIM)


def test_pooling_and_offsets_name_the_module_that_takes_them():
    with pytest.raises(ConfigError, match=r"Write instead: phalanx.ps.EmbeddingBag\(3, mode='sum'\)"):
        ps.SparseEmbedding(DIM, combiner="sum")
    with pytest.raises(ConfigError, match=r"offsets pool the rows.*EmbeddingBag\(3, mode='sum'\)\(ids, offsets\)"):
        ps.SparseEmbedding(DIM)(torch.tensor([1, 7]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "found list of int. Convert it with torch.tensor"),
        (["a", "b"], r"found list of str. Hash the texts: phalanx.ps.hash_ids\(texts, salt\)"),
        (np.array([b"a"]), "found ndarray of bytes_. Hash the texts"),
        ([[1, 2], [3]], r"found list of list. Where lengths differ, make a jagged tensor.*layout=torch.jagged"),
        (np.array([1]), "found ndarray of int64. Convert it with torch.from_numpy"),
        ("a", "found str. Convert"),
        (torch.ones(2), "ids must be integers, found dtype torch.float32"),
    ],
)
@pytest.mark.parametrize("kind", [ps.SparseEmbedding, ps.EmbeddingBag])
def test_ids_of_another_kind_say_what_makes_a_tensor_of_them(kind, ids, message):
    with pytest.raises(ConfigError, match=message):
        kind(DIM)(ids)


def test_padding_reads_zeros_and_is_not_trained():
    embedding = ps.SparseEmbedding(DIM, padding_idx=2, init=ps.Constant(1.0))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    out = embedding(torch.tensor([1, 2, 2, 3]))
    assert out[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0]
    out.sum().backward()
    optimizer.step()
    assert table_client.current().mode.store.report()[embedding.handle.table].rows == 2
    assert rows_of(embedding)[1:4, 0].tolist() == [0.5, 0.0, 0.5]


def test_one_lookup_for_all_features(monkeypatch):
    users, items = ps.SparseEmbedding(DIM, name="users"), ps.EmbeddingBag(2, name="items", mode="sum")
    users.requires_grad_(False)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    ids = [torch.tensor([1, 2]), torch.tensor([[1, 1], [3, 4]]), torch.tensor([2, 9])]
    pulls = []
    pull = table_client.TableClient.pull
    monkeypatch.setattr(table_client.TableClient, "pull", lambda self, wants: pulls.append(wants) or pull(self, wants))
    found = ps.lookup([(users, ids[0]), (items, ids[1]), (users, ids[2])])
    assert [[(h.table, keys.tolist()) for h, keys in wants] for wants in pulls] == [
        [("users", [1, 2, 9]), ("items", [1, 3, 4])]
    ]
    for output, module, each in zip(found, (users, items, users), ids, strict=True):
        assert torch.equal(output, module(each))
    sum(output.sum() for output in found).backward()
    optimizer.step()
    assert ps.lookup([]) == []
    assert users.handle.grad is None
    report = table_client.current().mode.store.report()
    assert {name: table.rows for name, table in report.items()} == {"items": 3}


def test_evaluation_makes_no_rows_and_no_gradient():
    embedding = ps.SparseEmbedding(DIM, optimizer=ps.SGD(0.1))
    with torch.no_grad():
        assert not embedding(torch.arange(5)).requires_grad
    assert table_client.current().mode.store.report()[embedding.handle.table].rows == 0


def test_entry_filters_count_occurrences_over_lookups():
    embedding = ps.SparseEmbedding(DIM, entry=ps.CountFilter(3), init=ps.Constant(1.0))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    for ids in ([1, 1, 2], [1, 2]):
        embedding(torch.tensor(ids)).sum().backward()
    assert rows_of(embedding).sum() == 0
    optimizer.step()
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert table_client.current().mode.store.report()[embedding.handle.table].rows == 2


def test_clicks_reach_the_table():
    embedding = ps.SparseEmbedding(1, entry=ps.ShowClick(drop_below=1.0))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    for clicks in ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]):
        embedding(torch.tensor([4, 5, 4]), clicks=torch.tensor(clicks)).sum().backward()
    optimizer.step()
    assert table_client.current().mode.store.shrink(embedding.handle.table) == 1
    assert table_client.current().mode.store.report()[embedding.handle.table].rows == 1


# --- the module -----------------------------------------------------------------------------------------------------


def test_rows_are_not_in_state_dict_and_loading_ignores_the_table():
    model = Model(ps.SparseEmbedding(DIM))
    assert list(model.state_dict()) == ["head.weight", "head.bias"]
    assert model.load_state_dict(model.state_dict()).missing_keys == []
    assert [tuple(p.shape) for p in model.parameters()] == [(0, DIM), (2, DIM), (2,)]


def test_copies_and_pickles_of_a_trained_module_read_the_same_table():
    model = Model(ps.SparseEmbedding(DIM))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer, torch.arange(4))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for other in others:
        assert other.embedding.handle is model.embedding.handle
        assert torch.equal(rows_of(other.embedding), rows_of(model.embedding))


def test_copies_of_an_unused_module_are_tables_of_their_own():
    first = ps.SparseEmbedding(DIM)
    second = copy.deepcopy(first)
    first(torch.arange(2))
    second(torch.arange(2))
    assert first.handle.table != second.handle.table


def test_modules_of_one_name_share_a_table_with_equal_settings_only():
    first = ps.SparseEmbedding(DIM, name="ids", seed=1)
    assert ps.EmbeddingBag(DIM, name="ids", seed=1).handle is first.handle
    with pytest.raises(ConfigError, match=r"name='ids' was made with seed=1 and is now asked with seed=2"):
        ps.SparseEmbedding(DIM, name="ids", seed=2)


def test_the_name_of_a_deleted_model_is_free():
    gc.disable()  # it lives on in a cycle, as a model of a script that ended does, until something collects it
    try:
        module = ps.SparseEmbedding(DIM, name="ids", seed=1)
        module.itself = [module]
        del module
        assert ps.SparseEmbedding(DIM, name="ids", seed=2).settings.seed == 2
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float16}, "must be torch.float32 or torch.bfloat16, found torch.float16"),
        ({"optimizer": 0.1}, r"SparseEmbedding\(optimizer=\) takes a value such as phalanx.ps.Adagrad"),
        ({"entry": 10}, r"SparseEmbedding\(entry=\) takes a value such as phalanx.ps.CountFilter"),
        ({"dim": 0}, r"SparseEmbedding\(dim=0\): Input should be greater than or equal to 1"),
        ({"seed": -1}, r"SparseEmbedding\(seed=-1\)"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ConfigError, match=message):
        ps.SparseEmbedding(**{"dim": DIM, **settings})


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Own, {}, "a table cannot follow Own. Use one of SGD, Adam"),
        (torch.optim.SGD, {"maximize": True}, "SGD with maximize=True"),
        (torch.optim.Adam, {"amsgrad": True}, "Adam with amsgrad=True"),
        (torch.optim.RMSprop, {"momentum": 0.5}, "RMSprop with momentum"),
        (torch.optim.Adam, {"eps": 0.0}, "Adam with eps=0.0"),
    ],
)
def test_an_optimizer_no_table_can_follow_is_named(kind, settings, message):
    model = Model(ps.SparseEmbedding(DIM))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    with pytest.raises(ConfigError, match=message):
        step(model, optimizer, torch.arange(2))


def test_ids_of_a_batch_are_read_once():
    embedding = ps.SparseEmbedding(DIM)
    embedding(torch.tensor([3, 3, 3])).sum().backward()
    assert embedding.handle.grad.tolist() == [[3.0] * DIM]
    assert embedding.handle.data.shape == (1, DIM)
    assert np.array_equal(embedding.handle._seen.counts, [3])
    assert F.embedding(torch.tensor([0]), embedding.handle.data).sum() == 0


# --- several optimizers, and a rate that warms up -------------------------------------------------------------------


def test_two_optimizers_that_step_in_turn_push_what_each_holds():
    sparse, dense = pair()
    for model in (sparse, dense):
        head = torch.optim.SGD(model.head.parameters(), lr=0.1)
        rows = torch.optim.Adam(model.embedding.parameters(), lr=0.05)
        for number, ids in enumerate(batches(4)):
            model(ids).square().mean().backward()
            head.step()
            head.zero_grad()
            if number % 2:  # the rows gather the gradients of two batches
                rows.step()
                rows.zero_grad()
    torch.testing.assert_close(rows_of(sparse.embedding), dense.embedding.weight.detach(), rtol=1e-5, atol=1e-6)
    assert table_client.current().skipped == 0


def test_a_table_follows_the_rate_of_each_step_while_it_warms_up():
    strategy = px.DistributedStrategy(warmup_steps=3)
    results = []
    for model in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        px.distribute(model, optimizer, strategy=strategy)
        for ids in batches(4):
            step(model, optimizer, ids)
        results.append(rows_of(model.embedding))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert table_client.current().mode.step == 4


def test_a_table_of_default_name_is_not_trained_by_a_second_model():
    first = nn.ModuleDict({"ids": ps.SparseEmbedding(DIM, optimizer=ps.SGD(0.1))})
    px.distribute(first)
    first["ids"](torch.arange(2))
    with pytest.raises(ConfigError, match=r"table 'ids' holds what another model of this process trained. Name"):
        px.distribute(nn.ModuleDict({"ids": ps.SparseEmbedding(DIM)}))


def test_steps_after_the_worker_stopped_are_refused():
    embedding = ps.SparseEmbedding(DIM)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.arange(2)).sum().backward()
    fleet.stop_worker()
    with pytest.raises(ClosedError, match=r"stepped after stop_worker\(\). Stop after the last step"):
        optimizer.step()


def test_rows_that_expire_go_with_any_entry_policy_but_show_and_click() -> None:
    assert ps.SparseEmbedding(4, entry=ps.CountFilter(2), unseen_days=3, name="counted").settings.unseen_days == 3
    with pytest.raises(ConfigError, match=r"unseen_days=3\): .*give entry=ShowClick\(unseen_days=3\)"):
        ps.SparseEmbedding(4, entry=ps.ShowClick(), unseen_days=3, name="shown")
    with pytest.raises(ConfigError, match=r"entry=\) takes a value such as .*found \[CountFilter"):
        ps.SparseEmbedding(4, entry=[ps.CountFilter(2), ps.ShowClick()], name="both")  # type: ignore[arg-type]
