"""The losses that models return, means over unequal numbers of labels: ranks have the gradients of one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from benchmarks.published_models import import_transformers
from foreign_models import ROWS, TOKENS, TRANSFORMERS, WORDS, Rows, padding, words
from phalanx.errors import ConfigError
from ranks import graphs_without_kernels, run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

Gradients = dict[str, Tensor]


def masked_lm() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, **sizes, **dropout))


class Squared(nn.Module):
    """Returns a loss that is a mean over labels, and no cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.table(input_ids)
        classes = F.one_hot(labels.clamp(min=0) % 3, 3)
        counted = labels != -100
        return SimpleNamespace(loss=(logits - classes)[counted].pow(2).mean(), logits=logits)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": TRANSFORMERS["GPT-2"].build,
    "Llama": TRANSFORMERS["Llama"].build,
    "T5": TRANSFORMERS["T5"].build,
    "masked BERT": masked_lm,
}


def data(kind: str) -> Rows:
    """Labels of which the second half of every batch counts fewer: of the last row of a batch none, or the first.

    Of kind "masked" they are those of "padded", and the columns have a mask of attention, which a graph looks at too.
    """
    labels = words(2)
    for row in range(ROWS):
        labels[row, {"whole": TOKENS, "alike": 3}.get(kind, (row * 5) % TOKENS) :] = -100
    return Rows({"input_ids": words(1), "labels": labels} | ({"attention_mask": padding()} if kind == "masked" else {}))


def trained(build: Callable[[], nn.Module], kind: str, entry: str, global_batch: int = 6, **options: Any) -> Gradients:
    """Return the gradients of the last of 3 batches, which has 4 rows, after the updates of the others."""
    torch.manual_seed(0)
    net = build().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    loading = {"global_batch": global_batch, "shuffle": False}
    if entry == "px.Model":
        px.Model(net, None, optimizer).train(1, data(kind), **loading)
    else:
        net, optimizer, loader = px.distribute(net, optimizer, data(kind), **loading)
        step = px.train_step(net, None, optimizer, **options)
        for batch in loader:
            step(batch)
    return {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}


def everything() -> dict[str, Gradients]:
    """Train every model; in one run, for each process would import the models again."""
    import_transformers()
    ranks, found = px.init().world_size, exact()
    if ranks == 1:
        found["compiled"] = gpt2(compiled=False)
    elif ranks == 2:
        # Traced and differentiated as graphs, which is where models differ.
        with graphs_without_kernels():
            found["compiled"] = gpt2(compiled=True)
    return found


def gpt2(*, compiled: bool) -> Gradients:
    return trained(MODELS["GPT-2"], "masked", "px.train_step", global_batch=8, compiled=compiled)


def exact() -> dict[str, Gradients]:
    found = {
        f"{name}, {entry}": trained(build, "padded", entry)
        for name, build in MODELS.items()
        for entry in ("px.Model", "px.train_step")
    }
    return found | {f"not known, {kind}": trained(Squared, kind, "px.train_step") for kind in ("whole", "alike")}


def refused() -> tuple[str, bool]:
    px.init()
    torch.manual_seed(0)
    net = Squared().double()
    before = net.table.weight.detach().clone()
    model = px.Model(net, None, torch.optim.SGD(net.parameters(), 0.05))
    with pytest.raises(ConfigError) as caught:
        model.train(1, data("padded"), global_batch=6, shuffle=False)
    return str(caught.value), torch.equal(net.table.weight, before)


@pytest.fixture(scope="module")
def one() -> dict[str, Gradients]:
    """What one process gives."""
    return run_ranks(everything, 1, timeout_s=140.0)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_unequal_numbers_of_labels_have_the_gradients_of_one_process(
    one: dict[str, Gradients], ranks: int
) -> None:
    for found in run_ranks(everything, ranks, timeout_s=140.0):
        assert found.keys() == one.keys() - ({"compiled"} if ranks > 2 else set())
        for name, gradients in found.items():
            # Some models of transformers take their loss in float32, and a sum of other terms rounds otherwise.
            assert_close(gradients, one[name], name, 1e-12 if name.startswith("not known") else 2e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_unequal_numbers_of_labels_under_another_loss_are_refused_before_the_first_update(ranks: int) -> None:
    for message, is_untouched in run_ranks(refused, ranks):
        assert "the loss that Squared returns is a mean over labels, ranks have unequal numbers of them" in message
        assert "px.weighted_mean" in message
        assert is_untouched


def assert_close(found: Gradients, reference: Gradients, label: str, tolerance: float) -> None:
    assert found.keys() == reference.keys()
    whole = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for name, gradient in reference.items():
        assert (found[name] - gradient).norm() <= tolerance * whole, f"{label}: {name}"
