"""An error that says that memory ran out also says what fills it, and what would save most."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.parallel.memory import out_of_memory
from phalanx.parallel.session import applied_to, set_applied
from phalanx.plan.buckets import MARK_BITS
from phalanx.plan.value import AllReduce, Axis, ParamRule, Plan, Step


class GrowsWithRows(nn.Module):
    """Asks for a quarter of a kilobyte with two rows, and for a petabyte with 64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(len(x) ** 8)
        return self.last(torch.tanh(self.first(x)))


def failed(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 64) -> list[str]:
    step = px.train_step(model, nn.functional.cross_entropy, optimizer)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        step(torch.randn(rows, 8), torch.zeros(rows, dtype=torch.int64))
    return [line for note in getattr(error.value, "__notes__", ()) for line in note.splitlines()]


def lines_with(words: str, lines: list[str]) -> list[str]:
    return [line for line in lines if words in line]


def test_a_step_tells_parameters_activations_and_settings() -> None:
    model = GrowsWithRows()
    optimizer = torch.optim.Adam(model.parameters())
    px.distribute(model, optimizer)
    lines = failed(model, optimizer)
    elements = 8 * 32 + 32 + 32 * 4 + 4
    assert lines[0] == "Out of memory: what rank 0 holds, and what would save most."
    assert lines_with("parameters", lines)[0].split()[-2] == f"{4 * elements:,}"
    assert lines_with("optimizer", lines)[0].split()[-2] == f"{2 * 4 * elements + 4 * 4:,}"
    (told,) = lines_with("bytes of activations", lines)
    kept = int(told.split()[-4].replace(",", ""))
    assert 64 * 32 * 4 <= kept <= 64 * 68 * 4  # what tanh gives, and at most what the layers give too
    assert lines[-2:] == [
        (
            "- strategy.recompute = True, which keeps no more of most modules than their inputs: saves about "
            f"{kept:,} bytes"
        ),
        f"- half the rows in a batch, with gradient_merge over 2 batches: saves about {kept // 2:,} bytes",
    ]


def test_sharding_is_named_with_its_bytes_where_there_are_ranks() -> None:
    model = GrowsWithRows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    px.distribute(model, optimizer)
    plan = Plan(
        mesh=(Axis(name="data", size=2),),
        params=(ParamRule(match="*", update=AllReduce()),),
        step=Step(batch_axes=("data",)),
    )
    set_applied(model, replace(applied_to(model), plan=plan))
    told = lines_with("strategy.sharding = True", failed(model, optimizer))
    # Half of parameters and gradients, and the flags and marks that travel with buckets.
    assert told == [
        (
            '- strategy.sharding = True with strategy.sharding_configs = {"stage": 3}: saves about '
            f"{420 * 4 + 4 * 4 + 2 * MARK_BITS * 4:,} bytes"
        )
    ]


def test_without_inputs_it_says_who_tells_and_one_note_is_enough() -> None:
    model = GrowsWithRows()
    px.distribute(model)
    error = MemoryError("none left")
    out_of_memory.explain_memory(error)
    out_of_memory.explain_memory(error)
    (note,) = error.__notes__
    assert "saves what px.explain(model, inputs) tells" in note


def test_other_errors_and_plain_models_get_no_note() -> None:
    error = RuntimeError("something else")
    out_of_memory.explain_memory(error)
    assert not hasattr(error, "__notes__")
    model = GrowsWithRows()
    assert failed(model, torch.optim.SGD(model.parameters(), lr=0.1)) == []
