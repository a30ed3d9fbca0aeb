"""Fleet's verbs and `px.distribute` on real ranks: every order works, every half-done set-up is named."""

import copy
import io
import logging
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx import fleet
from phalanx.comm import agreement, process_group
from phalanx.errors import ConfigError, PlanError, RoleError
from phalanx.parallel.session import applied_to
from ranks import rank_environment, run_ranks

pytestmark = pytest.mark.dist

ROWS = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2), torch.zeros(12))


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(rank: int):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 1, 28, 28, generator=generator), torch.randint(10, (4,), generator=generator)


def train_basic(parallel, start):
    context = start()
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = parallel(model)
    image, label = images(context.rank)
    for _ in range(2):
        loss = model.scale_loss(F.cross_entropy(model(image), label))
        loss.backward()
        model.apply_collective_grads()
        with pytest.raises(ConfigError, match=r"model.clear_gradients\(\): .*Write instead: optimizer.zero_grad"):
            model.clear_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def the_basic_api_in_its_spellings():
    from phalanx.distributed import DataParallel, init_parallel_env, prepare_context

    assert dist.is_initialized() is False
    assert (fleet.get_world_size(), fleet.get_rank() in (0, 1)) == (2, True)
    first = train_basic(DataParallel, init_parallel_env)
    second = train_basic(fleet.distributed_model, prepare_context)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    return fleet.get_rank(), [p.tolist() for p in first[-1:]]


def test_lenet_trains_by_the_basic_api_and_its_old_calls_change_nothing():
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for rank in range(2):
            image, label = images(rank)
            (F.cross_entropy(model(image), label) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    (rank0, bias), (rank1, same) = run_ranks(the_basic_api_in_its_spellings, 2)
    assert (rank0, rank1) == (0, 1)
    assert bias == same
    torch.testing.assert_close(torch.tensor(bias[0]), list(model.parameters())[-1].detach(), rtol=1e-5, atol=1e-6)


def one_script_for_both_modes(graph, model_first):
    strategy = fleet.DistributedStrategy()
    strategy.graph = graph
    fleet.init(is_collective=True, strategy=strategy)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    plain_keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if model_first:
        model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    if not model_first:
        model = fleet.distributed_model(model)
    loss = model(torch.ones(3, 2) * (fleet.worker_index() + 1)).square().mean()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 2))
    fleet.barrier_worker()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == plain_keys
    return [p.tolist() for p in model.parameters()], fleet.worker_num(), fleet.is_first_worker(), fleet.server_num()


@pytest.mark.parametrize(("graph", "model_first"), [(False, True), (True, False)])
def test_one_script_runs_in_both_modes_and_in_either_order(graph, model_first):
    first, second = run_ranks(one_script_for_both_modes, 2, graph, model_first, timeout_s=120)
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((2, True, 0), (2, False, 0))


def only_the_optimizer():
    fleet.init(is_collective=True)
    model = nn.Linear(2, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"no model is, so gradients would not be averaged"):
        optimizer.step()


def only_the_model():
    fleet.init(is_collective=True)
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    px.train_step(model, F.mse_loss, optimizer)


def a_strategy_without_its_optimizer():
    model, _, _ = px.distribute(nn.Linear(2, 1), strategy=fleet.DistributedStrategy(lars=True))
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()


def test_half_of_the_set_up_is_refused_or_warned_about_once():
    run_ranks(only_the_optimizer, 2)
    for outcome in run_ranks(only_the_model, 1, expect_failure=True):
        assert outcome.output.count("Call fleet.distributed_optimizer(optimizer) too.") == 2, "by the loop, by the step"
    for outcome in run_ranks(a_strategy_without_its_optimizer, 1, expect_failure=True):
        assert outcome.output.count("the model is distributed but no optimizer is, so lars cannot act.") == 1


def parameters_that_nobody_averages():
    fleet.init(is_collective=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    temperature = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    px.distribute(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0\.weight' \(and those of 1 others\) is not averaged.*It was frozen"):
        model(torch.ones(1, 2)).sum().backward()
    model[0].requires_grad_(False)
    model.zero_grad()
    temperature.sum().backward()
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3,\) is not averaged.*belongs to no distributed"):
        optimizer.step()

    replaced = nn.Linear(2, 1)
    px.distribute(replaced)
    replaced.load_state_dict(nn.Linear(2, 1).state_dict(), assign=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(replaced.parameters(), lr=0.1))
    replaced(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"'weight' .* another tensor stood in its place"):
        optimizer.step()


def test_a_step_over_gradients_that_are_not_averaged_is_refused():
    run_ranks(parameters_that_nobody_averages, 2)


def things_that_cannot_be_distributed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    px.distribute(model)
    with pytest.raises(PlanError, match=r"parameter 'weight' is distributed already, as '0\.weight' of another model"):
        px.distribute(model[0])
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet"):
        px.distribute(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module to distribute, found dict"):
        px.distribute({})
    with pytest.raises(PlanError, match="expected a phalanx Plan, found dict"):
        px.distribute(nn.Linear(1, 1), plan={"version": 1})
    loader = px.data.ShardedLoader(ROWS, batch_size=2)
    with pytest.raises(ConfigError, match=r"set up already. Found \['global_batch'\] beside it"):
        px.distribute(nn.Linear(1, 1), None, loader, global_batch=4)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    assert px.distribute(frozen)[0] is frozen


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_distributed_is_named(world_size):
    run_ranks(things_that_cannot_be_distributed, world_size)


def disagree():
    odd = px.init().rank == 1
    model = nn.Linear(2, 1)
    wider = copy.deepcopy(model)
    wider.register_buffer("extra", torch.zeros(3 if odd else 2))
    rows = torch.utils.data.Subset(ROWS, range(4 if odd else 8))
    messages = []
    for arguments in (
        {"data": ROWS, "global_batch": 6 if odd else 4},
        {"data": rows, "global_batch": 4},
        {"data": ROWS, "global_batch": 4, "seed": 1 if odd else 0},
        {} if odd else {"data": ROWS, "global_batch": 4},
        {"model": wider},
        {"strategy": px.DistributedStrategy(warmup_steps=5 if odd else 3)},
    ):
        with pytest.raises(ConfigError) as error:
            px.distribute(**{"model": model, **arguments})
        messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        (fleet.distributed_model if odd else px.distribute)(model)
    return [*messages, str(error.value)]


def test_ranks_that_disagree_all_fail_with_the_same_words():
    first, second = run_ranks(disagree, 2)
    assert first == second
    for message, (what, on0, on1) in zip(
        first,
        [
            ("data.global_batch", 4, 6),
            ("data.steps_per_epoch", 2, 1),
            ("data.seed", 0, 1),
            ("data.drop_last", "false", "nothing"),
            ("buffers.extra[0][0]", 2, 3),
            ("strategy.warmup_steps", 3, 5),
        ],
        strict=False,
    ):
        assert f"{what} must be the same on all ranks, found {on0} on rank 0; {on1} on rank 1" in message
    assert "Ranks are at different points of the script: data on rank 0; strategy on rank 1" in first[-1]


def batches_that_cannot_be():
    odd, model = px.init().rank == 1, nn.Linear(2, 1)
    messages = []
    for size in (100, "4", 100 if odd else 4):
        with pytest.raises(ConfigError) as error:
            px.distribute(model, None, ROWS, global_batch=size)
        messages.append(str(error.value))
    return messages


def test_a_batch_size_that_cannot_be_on_any_rank_is_an_error_on_all():
    first, second = run_ranks(batches_that_cannot_be, 2)
    assert first[:2] == second[:2]
    assert "global_batch=100, but TensorDataset has 12 samples, which is not one batch. Give at most 12" in first[0]
    assert "Asked for global_batch='4', found a value of type str. Give a whole number" in first[1]
    assert "data.cannot_load must be the same on all ranks, found nothing on rank 0; Asked for global_batch" in first[2]
    assert second[2] == first[0]


def on_a_server():
    fleet.init()
    assert fleet.is_server()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert (fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)) == (model, optimizer)
    with pytest.raises(RoleError, match="called on server 0"):
        fleet.barrier_worker()
    with pytest.raises(ConfigError, match=r"worker_index\(\) was called on server 0"):
        fleet.worker_index()
    return fleet.worker_num(), fleet.server_num(), fleet.is_worker()


def test_a_server_leaves_models_and_optimizers_alone():
    env = {
        "PHALANX_ROLE": "SERVER", "TRAINING_ROLE": "PSERVER", "PHALANX_SERVER_ENDPOINTS": "127.0.0.1:20001",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:20001", "PHALANX_ENDPOINT": "127.0.0.1:20001",
        "PADDLE_CURRENT_ENDPOINT": None, "PADDLE_PORT": "20001", "POD_IP": "127.0.0.1",
    }  # fmt: skip
    assert run_ranks(on_a_server, 1, env=env) == [(1, 1, False)]


def group_of_the_script(store_path):
    rank = int(os.environ["WHO"])
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=2)
    context = px.init()
    model, _, _ = px.distribute(nn.Linear(2, 1))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return context.rank, context.world_size, model.weight.grad.tolist()


def test_a_group_that_the_script_made_without_a_launcher_is_used(tmp_path):
    nothing = dict.fromkeys(rank_environment(0, 2, 1, tmp_path))
    results = run_ranks(
        group_of_the_script, 2, str(tmp_path / "store"), env=nothing, env_of_rank=lambda rank: {"WHO": str(rank)}
    )
    assert results == [(rank, 2, [[1.5, 1.5]]) for rank in range(2)]


def copied_and_saved():
    px.init()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    px.DataParallel(model)
    fleet.distributed_optimizer(optimizer)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(saved["model"])
        assert applied_to(other) is None
        issued = applied_to(model).reducer.collectives_issued
        other(torch.ones(3, 2)).sum().backward()
        assert applied_to(model).reducer.collectives_issued == issued
    again = copy.deepcopy(optimizer)
    again.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    return list(saved["model"]) == list(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict())


def test_copies_and_saved_files_are_those_of_the_plain_model():
    assert run_ranks(copied_and_saved, 2) == [True] * 2


def explained():
    model, _, _ = px.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False)))
    with pytest.raises(ConfigError, match="explain needs a distributed model, and this Linear is not"):
        px.explain(nn.Linear(1, 1))
    return str(px.explain(model))


def test_the_applied_plan_is_shown_as_a_table():
    table, same = run_ranks(explained, 2)
    assert "Memory of rank 0 between steps" in table
    assert table == same.replace("Memory of rank 1", "Memory of rank 0")
    for line in ("Plan over data=2", "2 gradients in 1 all-reduces per step", "nothing (frozen)"):
        assert line in table


def saved_by_fleets_verbs(folder):
    fleet.init(is_collective=True)
    torch.manual_seed(fleet.worker_index())
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def saved():
        fleet.barrier_worker()
        if fleet.worker_index() == 1:  # any one worker may
            fleet.save_persistables(folder)
        fleet.barrier_worker()
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        fleet.load(folder)
        return bool(torch.equal(model.weight, before))

    step()
    came_back = [saved()]
    step()
    came_back.append(saved())  # what was trained since is written too
    fleet.save_inference_model(f"{folder}-serving")
    assert fleet.shrink() == 0
    with pytest.raises(ConfigError, match=r"There are no executors, programs and .*Write fleet.save_persistables\("):
        fleet.save_persistables(None, folder)
    with pytest.raises(ConfigError, match=r"Write fleet.save_inference_model\(directory\)"):
        fleet.save_inference_model(None, folder, ["x"], [])
    with pytest.raises(ConfigError, match=r"Write fleet.load\(directory\)"):
        fleet.load(dirname=folder)
    return came_back


def cut_models_saved_by_fleets_verbs(folder):
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(sharding=True))
    fleet.distributed_optimizer(torch.optim.SGD((model := nn.Linear(4, 4)).parameters(), lr=0.1))
    fleet.distributed_model(model)
    fleet.save_persistables(folder)


def test_fleets_save_verbs_work_in_a_collective_job(tmp_path):
    assert run_ranks(saved_by_fleets_verbs, 2, str(tmp_path / "saved")) == [[True, True]] * 2
    for outcome in run_ranks(cut_models_saved_by_fleets_verbs, 2, str(tmp_path / "cut"), expect_failure=True):
        assert outcome.error_type == "ConfigError"
        assert "is cut over ranks. Call px.save(folder, model, optimizer) and px.load on all ranks" in outcome.message


def a_worker_that_is_late():
    fleet.init(is_collective=True)
    said = []
    agreement.SAY_EVERY_S = 0.05
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("phalanx.comm").addHandler(handler)
    store = process_group.meeting().store
    if fleet.worker_index() == 1:
        store.wait(["named"], 30)
    else:
        handler.emit = lambda record: (said.append(record.getMessage()), store.set("named", ""))
    fleet.barrier_worker()
    return said


def test_a_barrier_names_the_worker_it_waits_for():
    first, second = run_ranks(a_worker_that_is_late, 2)
    assert "waiting for rank 1" in first[0]
    assert "'barrier_worker', which only rank 0 called so far" in first[0]
    assert second == []
