"""One step as one call: eager and compiled give the same losses, few graphs, named fetches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def correct(output, target):
    return (output.argmax(1) == target).sum()


def train(graph: bool):
    px.init()
    strategy = px.DistributedStrategy(graph=graph, warmup_steps=3)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(4 * 64 + 34, 1, 8, 8, generator=generator), torch.randint(5, (4 * 64 + 34,), generator=generator)
    )
    model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=64, strategy=strategy, shuffle=False)
    step = px.train_step(model, F.cross_entropy, optimizer, fetch={"correct": correct})
    losses = []
    for _ in range(2):
        for image, label in loader:
            out = step(image, label)
            losses.append(out.loss.item())
            assert out["correct"] == out.correct
            assert set(out) == {"loss", "correct"}
    return losses, step.forward_graphs, step.update_graphs, step.compile_s, step.summary()


@pytest.fixture(scope="module")
def eager_and_compiled(tmp_path_factory):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    return [run_ranks(train, 2, graph, timeout_s=240, env=cache) for graph in (False, True, True)]


@pytest.mark.timeout(500)  # whichever comes first compiles
def test_compiled_losses_equal_eager_ones(eager_and_compiled):
    eager, compiled, _ = eager_and_compiled
    for a, b in zip(eager, compiled, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-4)


@pytest.mark.timeout(500)  # whichever comes first compiles
def test_the_short_last_batch_costs_at_most_one_more_graph(eager_and_compiled):
    for _, forward_graphs, update_graphs, _, _ in eager_and_compiled[1]:
        assert forward_graphs == 2
        assert update_graphs <= 2  # the second, because momentum buffers exist from the second step on


@pytest.mark.timeout(500)  # whichever comes first compiles
def test_compile_time_is_kept_apart_and_the_second_run_reuses_the_cache(eager_and_compiled):
    eager, cold, warm = (results[0] for results in eager_and_compiled)
    assert eager[3] == 0.0
    assert cold[3] > 0.0
    assert " 0 from the cache" not in warm[4]
    assert "compiling" in warm[4]


class Tuned(nn.Module):
    """Float64, so that a learning rate rounded to float32 would show; dropout, so that eval() matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 5)).double()

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layers(x["rows"])


def train_with_schedules(compiled):
    """The strategy does not ask for graphs: the step alone is compiled."""
    torch._dynamo.reset()
    model = Tuned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    px.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    step = px.train_step(model, F.cross_entropy, optimizer, compiled=compiled, fetch={"rows": lambda o, t: len(t)})
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(8):
        rows = torch.randn(8, 3, generator=generator).double()
        out = step({"rows": rows}, torch.randint(5, (8,), generator=generator))
        assert out.rows == 8
        losses.append(out.loss.item())
        scheduler.step()
        if number == 5:
            optimizer.param_groups[0]["lr"] = 0.03  # as scripts do by hand
            optimizer.load_state_dict(optimizer.state_dict())
    model.eval()
    with torch.no_grad():
        model({"rows": rows})
    return losses, float(optimizer.param_groups[0]["lr"]), step.forward_graphs, step.update_graphs


def compiled_by_hand():
    """A distributed model that its user compiles is traced once, our hook on it included."""
    graphs = torch._dynamo.testing.CompileCounter()
    model, _, _ = px.distribute(nn.Linear(2, 1))
    traced = torch.compile(model, backend=graphs)
    for _ in range(5):
        traced(torch.ones(1, 2)).sum().backward()
    return graphs.frame_count


def schedules_and_compilers():
    strategy = px.DistributedStrategy(warmup_steps=3)
    px.fleet.init(is_collective=True, strategy=strategy)
    return train_with_schedules(False), train_with_schedules(True), compiled_by_hand()


def test_schedules_and_rates_set_by_hand_cost_no_graph_and_lose_no_digit():
    eager, compiled, by_hand = run_ranks(schedules_and_compilers, 1, timeout_s=120)[0]
    assert compiled[0] == pytest.approx(eager[0], rel=1e-12)
    assert compiled[1] == pytest.approx(eager[1], rel=1e-15)
    assert compiled[2:] == (1, 2)
    assert by_hand == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def drop_out():
    rank = px.init().rank
    model, _, _ = px.distribute(Noisy())
    torch.manual_seed(10 + rank)
    model(torch.ones(4, 6)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_dropout_draws_from_each_ranks_own_stream():
    model = Noisy()
    for rank in range(2):
        torch.manual_seed(10 + rank)
        (model(torch.ones(4, 6)).square().mean() / 2).backward()
    for gradients in run_ranks(drop_out, 2):
        for found, param in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad, rtol=1e-5, atol=1e-7)


def wrong_uses():
    px.init()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = px.train_step(model, F.cross_entropy, optimizer)
    with pytest.raises(ConfigError, match="found 3 values"):
        step(1, 2, 3)
    with pytest.raises(ConfigError, match="'loss' is always fetched"):
        px.train_step(model, F.cross_entropy, optimizer, fetch={"loss": correct})
    out = step((torch.randn(2, 1, 8, 8), torch.tensor([0, 1])))
    with pytest.raises(KeyError, match="Did you mean 'loss'"):
        out["los"]
    with pytest.raises(AttributeError, match="fetches"):
        _ = out.accuracy
    px.distribute(model, optimizer)
    for word in ("minimize", "clear_grad"):
        with pytest.raises(ConfigError, match="Write instead"):
            getattr(optimizer, word)()
    return True


def test_wrong_uses_are_explained():
    assert run_ranks(wrong_uses, 1) == [True]


def train_on_a_label_that_is_no_class():
    rank = px.init().rank
    model = nn.Linear(2, 3)
    model, optimizer, _ = px.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = px.train_step(model, F.cross_entropy, optimizer)
    step(torch.ones(2, 2), torch.tensor([0, 3 if rank else 2]))


def test_a_label_of_one_rank_that_is_no_class_is_an_error_on_all_before_the_first_update():
    first, second = run_ranks(train_on_a_label_that_is_no_class, 2, expect_failure=True)
    assert (first.error_type, second.error_type) == ("ConfigError", "DataError")
    for outcome in (first, second):
        assert "The label 3, of sample 1 of this rank's batch, is outside the 3 classes" in outcome.message
    assert "on rank 1" in first.message
