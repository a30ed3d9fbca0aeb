"""Parameter servers: sharded embedding tables and dense parameters, pulled and pushed by workers.

In: ids of 64 bits and gradients of their rows. Out: rows, from servers or this process, trained where they are stored.
Start with `embedding`; `client` is the worker's side, `server` the other, `stores` what is between them, `table` the
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:  # names resolved by __getattr__ below, so that values cost no torch and embeddings no server
    from phalanx.ps.client.prefetch import prefetch
    from phalanx.ps.embedding import SparseEmbedding
    from phalanx.ps.pooling.bag_collection import BagCollection
    from phalanx.ps.pooling.embedding_bag import EmbeddingBag
    from phalanx.ps.queries import lookup
    from phalanx.ps.table.rules import Constant, CountFilter, Normal, Probability, ShowClick, Uniform
    from phalanx.ps.table.update_rules import FTRL, SGD, Adagrad, Adam, Momentum, RMSprop, RowWiseAdagrad
    from phalanx.ps.text_ids import hash_ids

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "BagCollection",
    "Constant",
    "CountFilter",
    "EmbeddingBag",
    "Momentum",
    "Normal",
    "Probability",
    "RMSprop",
    "RowWiseAdagrad",
    "ShowClick",
    "SparseEmbedding",
    "Uniform",
    "hash_ids",
    "lookup",
    "prefetch",
]

_HOMES = dict.fromkeys(__all__, "table.update_rules") | {
    **dict.fromkeys(("Constant", "CountFilter", "Normal", "Probability", "ShowClick", "Uniform"), "table.rules"),
    "BagCollection": "pooling.bag_collection",
    "EmbeddingBag": "pooling.embedding_bag",
    "SparseEmbedding": "embedding",
    "hash_ids": "text_ids",
    "lookup": "queries",
    "prefetch": "client.prefetch",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
