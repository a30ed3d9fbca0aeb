"""Models with tables on real servers: equal to one process where the mode promises it; what cannot work is named."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx import fleet, ps
from phalanx.comm import context as context_of
from phalanx.errors import ConfigError, PlanError, RoleError
from phalanx.ps.client import table_client
from ps_servers import SECRET, servers
from ranks import run_ranks

pytestmark = pytest.mark.dist

STEPS, ROWS, IDS, DIM = 5, 6, 20, 3


def model_of(**settings):
    torch.manual_seed(0)
    return WideDeep(**settings)


class WideDeep(nn.Module):
    """A sparse part, a dense part, and a layer that some steps do not use."""

    def __init__(self, **settings):
        super().__init__()
        self.deep = ps.SparseEmbedding(DIM, init=ps.Normal(1.0), name="deep", **settings)
        self.wide = ps.SparseEmbedding(1, name="wide", **settings)
        self.body = nn.Sequential(nn.Linear(2 * DIM, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.extra = nn.Linear(DIM, 1)

    def forward(self, ids, use_extra=False):
        deep, wide = ps.lookup([(self.deep, ids), (self.wide, ids)])
        out = self.body(deep.flatten(1)) + wide.sum(1)
        return out + self.extra(deep[:, 0]) if use_extra else out


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(IDS, (ROWS, 2), generator=generator), torch.randn(ROWS, 1, generator=generator)


def loss_of(model, step, rows):
    ids, target = data(step)
    return F.mse_loss(model(ids[rows], use_extra=step == 1), target[rows])


def state_of(model):
    """Everything that was trained, by name."""
    model.eval()
    with torch.no_grad():
        rows = {name: getattr(model, name)(torch.arange(IDS)).tolist() for name in ("deep", "wide")}
    return rows | {
        name: p.tolist() for name, p in model.state_dict().items() if "running" not in name and "batch" not in name
    }


def assert_same(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        theirs, ours = np.array(value), np.array(found[name])
        assert np.linalg.norm(ours - theirs) <= tolerance * max(np.linalg.norm(theirs), 1.0), name


def job(endpoints, secret=SECRET):
    listed = ",".join(endpoints)
    return {
        "PHALANX_SERVER_ENDPOINTS": listed,
        "PADDLE_PSERVERS_IP_PORT_LIST": listed,
        "PHALANX_JOB_SECRET": secret.hex(),
    }


def train(style, configs, kind, settings, sync=True):
    """One worker's training; the body runs in eval mode, so that batch norm does not tell workers apart."""
    strategy = fleet.DistributedStrategy(a_sync=not sync, a_sync_configs=configs)
    context = fleet.init(strategy=strategy)
    model = model_of(seed=4)
    if context.rank:  # worker 0's values count
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    model.body[1].eval()
    optimizer = kind(model.parameters(), **settings)
    if style == "fleet":
        optimizer = fleet.distributed_optimizer(optimizer, strategy)
        model = fleet.distributed_model(model)
    elif style == "optimizer only":
        optimizer = fleet.distributed_optimizer(optimizer)
    else:
        model, optimizer, _ = px.distribute(model, optimizer)
    fleet.init_worker()
    rows = slice(context.rank, None, context.world_size)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step()
    fleet.barrier_worker()
    state = state_of(model)
    fleet.stop_worker()
    return state, table_client.current().skipped


def one_process(kind, settings):
    """The same training on the whole batch, in this process, without servers."""
    model = model_of(seed=4)
    model.body[1].eval()
    optimizer = kind(model.parameters(), **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, slice(None)).backward()
        optimizer.step()
    state = state_of(model)
    table_client.current().finish()
    context_of.shutdown()
    return state


SGD = (torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    ("style", "configs", "rule", "n"),
    [
        ("fleet", {}, SGD, 1),
        ("optimizer only", {}, SGD, 2),
        ("distribute", {"dense": "all_reduce"}, SGD, 2),
        ("distribute", {}, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), 1),
        ("distribute", {}, (torch.optim.Adam, {"lr": 0.01}), 1),
    ],
)
def test_sync_training_of_two_workers_equals_one_process(style, configs, rule, n):
    with servers(n) as made:
        found = run_ranks(train, 2, style, configs, *rule, env=job(made.endpoints))
    expected = one_process(*rule)
    for state, skipped in found:
        assert_same(state, expected)
        assert skipped == 0


# --- sync keeps its promise in odd steps ----------------------------------------------------------------------------


def train_with_a_loader():
    """Uneven batches, accumulation and clipping, as the loader cuts them."""
    ids, target = (
        torch.randint(IDS, (10, 2), generator=torch.Generator().manual_seed(0)),
        torch.arange(10.0).view(10, 1),
    )
    model = model_of(seed=4)
    model.body[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(a_sync=False)
    model, optimizer, loader = px.distribute(
        model, optimizer, (ids, target), global_batch=3, shuffle=False, strategy=strategy
    )
    for number, (x, y) in enumerate(loader):
        F.mse_loss(model(x), y).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    state = state_of(model)
    fleet.stop_worker()
    return state


def test_uneven_batches_and_accumulation_stay_exact():
    with servers() as made:
        found = run_ranks(train_with_a_loader, 2, env=job(made.endpoints))
    expected = train_with_a_loader()
    for state in found:
        assert_same(state, expected)


def clip_in_hybrid_mode(together):
    said = []
    logging.getLogger("phalanx.ps").addFilter(lambda record: said.append(record.getMessage()) or True)
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"dense": "all_reduce"})
    fleet.init(strategy=strategy)
    model = model_of(optimizer=ps.SGD(lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = px.distribute(model, optimizer, strategy=strategy)
    rows = slice(context_of.current().rank, None, 2)
    apart = ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rows).backward()
            nn.utils.clip_grad_norm_(model.parameters() if together else model.body.parameters(), 0.01)
            optimizer.step()
    except ConfigError as error:
        apart = str(error)
    fleet.stop_worker()
    return [line for line in said if "dense parameters must be the same" in line], apart


@pytest.mark.parametrize("together", [True, False])
def test_dense_parameters_that_clipping_drives_apart_are_noticed(together):
    with servers() as made:
        first, second = run_ranks(clip_in_hybrid_mode, 2, together, env=job(made.endpoints))
    assert second[0] == []
    assert [("after step 1 those of workers [1] are not" in line) for line in first[0]] == [True] * together
    for _, apart in (first, second):
        assert ("the ranks' parameters have come apart" in apart) is together
        assert ("clip rows and dense parameters apart" in apart) is together


def skip_on_one_worker():
    strategy = fleet.DistributedStrategy(a_sync=False)
    context = fleet.init(strategy=strategy)
    model = model_of()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        loss = loss_of(model, step, slice(None)) * (float("inf") if context.rank == 1 and step == 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    fleet.stop_worker()
    return table_client.current().skipped, table_client.current().mode.step


def test_a_step_that_a_scaler_skips_holds_nobody_up():
    with servers() as made:
        assert run_ranks(skip_on_one_worker, 2, env=job(made.endpoints)) == [(0, 4), (1, 4)]


# --- snapshots ------------------------------------------------------------------------------------------------------


def first_day(folder, all_save):
    context = fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    model = model_of()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    model = fleet.distributed_model(model)
    for step in range(3):
        loss_of(model, step, slice(context.rank, None, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if all_save or context.rank == 1:
        fleet.save_persistables(folder)
    fleet.barrier_worker()
    state = state_of(model)
    fleet.stop_worker()
    return state


def second_day(folder, names):
    context = fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    model = model_of()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))
    model = fleet.distributed_model(model)
    fleet.load(folder, names)
    loaded = state_of(model)
    model.deep(torch.tensor([IDS + context.rank])).sum().backward()
    optimizer.step()
    fleet.barrier_worker()
    rows = table_client.current().mode.store.report()["deep"].rows
    fleet.stop_worker()
    return loaded, rows


@pytest.mark.parametrize("all_save", [True, False])
def test_a_job_saves_once_and_any_other_job_goes_on_from_it(tmp_path, all_save):
    folder = str(tmp_path / "day1")
    with servers(2) as made:
        saved, same = run_ranks(first_day, 2, folder, all_save, env=job(made.endpoints))
    assert saved == same
    if all_save:
        with servers(1) as made:
            for loaded, rows in run_ranks(second_day, 2, folder, None, env=job(made.endpoints)):
                assert loaded == saved
                assert rows > IDS // 2
    alone, _ = second_day(folder, None)
    assert alone == saved, "in one process, without servers"
    table_client.current().finish()
    context_of.shutdown()
    named, _ = second_day(folder, ["wide"])
    assert named["wide"] == saved["wide"]
    assert named["deep"] != saved["deep"]


def train_and_save(folder):
    model = fleet.distributed_model(model_of())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
    loss_of(model, 0, slice(None)).backward()
    optimizer.step()
    fleet.save_inference_model(folder)
    return state_of(model)


def test_servers_go_on_from_what_one_process_saved(tmp_path):
    (saved,) = run_ranks(train_and_save, 1, str(tmp_path))
    with servers(1) as made:
        for loaded, _ in run_ranks(second_day, 2, str(tmp_path), None, env=job(made.endpoints)):
            assert loaded == saved


def load_and_predict(folder):
    model = fleet.distributed_model(model_of())
    fleet.load(folder)
    return state_of(model)


class Renamed(nn.Module):
    """The same dense part as `WideDeep` has, and a table of another name than any of its tables."""

    def __init__(self):
        super().__init__()
        plain = model_of()
        self.deeper = ps.SparseEmbedding(DIM, name="deeper")
        self.body, self.extra = plain.body, plain.extra


def test_a_table_that_only_model_or_snapshot_has_is_named(tmp_path, caplog):
    train_and_save(str(tmp_path))
    model = fleet.distributed_model(Renamed())
    fleet.load(str(tmp_path))
    assert model.deeper.handle.table == "deeper"
    assert "has no rows of 'deeper', which stay as they are; it has 'deep', 'wide'" in caplog.text
    assert "also has rows of 'deep', 'wide', which no distributed model uses" in caplog.text
    caplog.clear()
    fleet.load(str(tmp_path), ["deep"])
    assert not caplog.text, "what was asked for by name"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    fleet.init()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the folder '.*/file/day1' cannot be made: Not a directory. Name one"):
        fleet.save_persistables(tmp_path / "file" / "day1")


def test_a_model_predicts_from_a_snapshot_without_an_optimizer(tmp_path):
    (expected,) = run_ranks(train_and_save, 1, str(tmp_path))
    assert run_ranks(load_and_predict, 1, str(tmp_path)) == [expected]


# --- roles and errors -----------------------------------------------------------------------------------------------


def on_the_wrong_role(is_server):
    fleet.init()
    assert fleet.is_server() == is_server
    model = nn.Linear(1, 1)
    if is_server:
        fleet.init_server()
        assert fleet.distributed_model(model) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert fleet.distributed_optimizer(optimizer) is optimizer
    workers = (
        fleet.init_worker,
        fleet.stop_worker,
        lambda: fleet.save_persistables("x"),
        lambda: fleet.save_inference_model("x"),
        lambda: fleet.load("x"),
        fleet.shrink,
        fleet.barrier_worker,
    )
    for call in workers if is_server else (fleet.init_server, fleet.run_server):
        with pytest.raises(RoleError, match=r"was called on (server|worker) 0. Ask fleet.is_(worker|server)\(\) first"):
            call()


def test_verbs_of_the_other_role_are_errors():
    run_ranks(on_the_wrong_role, 1, False)
    as_server = {"PHALANX_ROLE": "SERVER", "TRAINING_ROLE": "PSERVER"}
    run_ranks(on_the_wrong_role, 1, True, env=as_server | job(["127.0.0.1:20000"]))


def without_servers():
    with pytest.raises(PlanError, match="2 workers share table 'deep', but the job has no parameter server"):
        px.distribute(model_of())
    with pytest.raises(ConfigError, match="Launch with `phalanx run --server-num 1 --worker-num 2"):
        model_of()(data(0)[0])


def test_tables_of_several_workers_need_a_server():
    run_ranks(without_servers, 2)


def what_cannot_work():
    fleet.init()
    with pytest.raises(ConfigError, match=r"table 'deep' has no update rule yet. Call distributed_optimizer"):
        model_of()(data(0)[0])
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 100})
    model = model_of()
    with pytest.raises(ValueError, match="uses 'adam', and geo mode trains with SGD"):
        fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), strategy)


def test_what_servers_cannot_do_is_named():
    with servers() as made:
        run_ranks(what_cannot_work, 1, env=job(made.endpoints))
