"""Embeddings of torch and collections of TorchRec become tables with their rows, and tables become embeddings."""

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from phalanx import ps
from phalanx.errors import ConfigError
from phalanx.ps import conversions
from phalanx.ps.client.table_client import current

N, DIM = 6, 3


def train(module, *arguments):
    """Train a few steps and return what the module then gives."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(*arguments).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return module(*arguments)


def test_an_embedding_keeps_its_rows_and_trains_on_and_back():
    plain = nn.Embedding(N, DIM, padding_idx=2)
    ours = ps.SparseEmbedding.from_torch(plain, name="words")
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert torch.equal(ours(ids), plain(ids))
    torch.testing.assert_close(train(ours, ids), train(plain, ids))
    back = ours.to_torch(N)
    assert isinstance(back, nn.Embedding)
    assert (back.padding_idx, back.weight.requires_grad) == (2, True)
    torch.testing.assert_close(back.weight, plain.weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_keeps_its_rows_and_mode_and_trains_on_and_back(mode):
    plain = nn.EmbeddingBag(N, DIM, mode=mode, include_last_offset=True, padding_idx=0)
    ours = ps.EmbeddingBag.from_torch(plain)
    batch = torch.tensor([0, 1, 1, 2, 3, 4, 5]), torch.tensor([0, 3, 3, 7])
    assert torch.equal(ours(*batch), plain(*batch))
    torch.testing.assert_close(train(ours, *batch), train(plain, *batch))
    back = ours.to_torch(N)
    assert (back.mode, back.include_last_offset, back.padding_idx) == (mode, True, 0)
    torch.testing.assert_close(back(*batch), plain(*batch))


def test_other_ids_start_as_the_table_says():
    ours = ps.SparseEmbedding.from_torch(nn.Embedding(N, DIM), init=ps.Constant(7.0), optimizer=ps.SGD(0.1))
    others = torch.tensor([-1, N, 2**62])
    for _ in range(2):
        assert ours(others).unique().tolist() == [7.0]
        ours(torch.tensor([0])).sum().backward()
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0).step()  # makes the table


def test_rows_of_any_ids_in_their_order_and_in_several_requests(monkeypatch):
    monkeypatch.setattr(conversions, "PULL_KEYS", 2)
    ours = ps.SparseEmbedding(DIM, padding_idx=9, init=ps.Normal(1.0))
    ids = torch.tensor([5, -3, 9, 2**60, 1])
    back = ours.to_torch(ids)
    assert torch.equal(back.weight, ours(ids))
    assert back.padding_idx == 2
    assert ours.to_torch(0).weight.shape == (0, DIM)


def test_device_and_dtype_are_those_of_the_module():
    plain = nn.Embedding(N, DIM, dtype=torch.float64)
    ours = ps.SparseEmbedding.from_torch(plain)
    assert ours(torch.tensor([1])).dtype is ours.to_torch(N).weight.dtype is torch.float64
    torch.testing.assert_close(ours.to_torch(N).weight, plain.weight, rtol=1e-6, atol=1e-6)


def test_copies_and_pickles_of_a_converted_module_have_the_rows_before_training():
    for name in (None, "words"):
        plain = nn.Embedding(N, DIM)
        ours = ps.SparseEmbedding.from_torch(plain, name=name)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)):
            assert torch.equal(other(torch.arange(N)), plain.weight)
    trained = train(ours, torch.arange(N))
    assert torch.equal(copy.deepcopy(ours)(torch.arange(N)), trained)
    assert current().registry.is_declared(ours.handle)


def test_what_cannot_be_converted_is_an_error():
    with pytest.raises(ConfigError, match=r"from_torch takes an nn.Embedding with a weight, found EmbeddingBag"):
        ps.SparseEmbedding.from_torch(nn.EmbeddingBag(N, DIM))
    with pytest.raises(ConfigError, match=r"from_torch takes an nn.EmbeddingBag with a weight, found Embedding"):
        ps.EmbeddingBag.from_torch(nn.Embedding(N, DIM))
    with pytest.raises(ConfigError, match=r"the nn.Embedding has max_norm, which tables do not do"):
        ps.SparseEmbedding.from_torch(nn.Embedding(N, DIM, max_norm=1.0))
    with pytest.raises(ConfigError, match="on the meta device"):
        ps.SparseEmbedding.from_torch(nn.Embedding(N, DIM, device="meta"))
    padded = nn.Embedding.from_pretrained(torch.ones(N, DIM), padding_idx=1)
    with pytest.raises(ConfigError, match="its padding_idx, is not zero, and padding reads as zeros"):
        ps.SparseEmbedding.from_torch(padded)
    words = ps.SparseEmbedding(DIM, name="words")
    with pytest.raises(ConfigError, match="this process has a table 'words' already"):
        ps.SparseEmbedding.from_torch(nn.Embedding(N, DIM), name="words")
    with pytest.raises(ConfigError, match=r"found shape \(2,\) with ids that occur twice"):
        words.to_torch(torch.tensor([1, 1]))
    with pytest.raises(ConfigError, match=r"found shape \(1, 1\)\."):
        words.to_torch(torch.tensor([[1]]))


# --- TorchRec: objects with the methods of its classes ----------------------------------------------------------------


@dataclass
class Config:
    name: str
    feature_names: list[str]


class Collection(nn.Module):
    """What of an `EmbeddingBagCollection` is read."""

    def __init__(self, configs, weighted=False):
        super().__init__()
        self.configs, self.weighted = configs, weighted
        mode = "sum" if weighted else "mean"
        bags = {c.name: nn.EmbeddingBag(N, DIM, mode=mode, include_last_offset=True) for c in configs}
        self.embedding_bags = nn.ModuleDict(bags)

    def embedding_bag_configs(self):
        return self.configs

    def is_weighted(self):
        return self.weighted


@dataclass
class Jagged:
    """What of a `JaggedTensor` is read."""

    ids: torch.Tensor
    begins: torch.Tensor
    weights: torch.Tensor | None = None

    def values(self):
        return self.ids

    def offsets(self):
        return self.begins

    def weights_or_none(self):
        return self.weights


BATCH = {
    "user": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), torch.tensor([0.5, 2.0, 3.0])),
    "item": Jagged(torch.tensor([4, 4]), torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0])),
}


@pytest.mark.parametrize("weighted", [False, True])
def test_a_collection_gives_what_its_bags_give_with_one_request(weighted, monkeypatch):
    configs = [Config("a", ["user", "item"]), Config("b", ["item"])]
    theirs = Collection(configs, weighted)
    ours = ps.BagCollection.from_torchrec(theirs, optimizer=ps.Adagrad(0.1))
    calls = []
    pull = type(current()).pull
    monkeypatch.setattr(type(current()), "pull", lambda self, specs: calls.append(len(specs)) or pull(self, specs))
    pooled = ours(BATCH)
    assert calls == [2]
    assert list(pooled) == ["user", "item@a", "item@b"]
    for label, (table, feature) in zip(pooled, [("a", "user"), ("a", "item"), ("b", "item")], strict=True):
        jagged = BATCH[feature]
        weights = jagged.weights if weighted else None
        expected = theirs.embedding_bags[table](jagged.ids, jagged.begins, weights)
        torch.testing.assert_close(pooled[label], expected)
    assert ours.bags["a"].settings.optimizer == ps.Adagrad(0.1)


def test_a_batch_without_a_feature_and_something_else_than_a_collection_are_errors():
    ours = ps.BagCollection.from_torchrec(Collection([Config("a", ["user", "shop"])]))
    with pytest.raises(ConfigError, match="the batch has no feature shop; it has user, item"):
        ours(BATCH)
    with pytest.raises(ConfigError, match="found Linear without embedding_bag_configs, embedding_bags, is_weighted"):
        ps.BagCollection.from_torchrec(nn.Linear(1, 1))
