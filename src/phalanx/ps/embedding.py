"""`SparseEmbedding`: an embedding over 64-bit ids, stored on the parameter servers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.conversions import check_convertible, rows_for_torch, start_from_torch
from phalanx.ps.features import Feature
from phalanx.ps.ids import check_ids, check_per_id, values_of
from phalanx.ps.table.rules import EntryPolicy, Init
from phalanx.ps.table.update_rules import Rule
from phalanx.ps.table_module import Query, TableModule


class SparseEmbedding(TableModule):
    """Looks up rows by id in a table that grows from empty: any 64-bit id has a row, derived from it until trained.

    Use it as `nn.Embedding`; `EmbeddingBag` pools the rows of each sample. Rows live on the parameter servers of the
    job, or in this process when there is one worker and no server. They are pulled in forward and their gradients
    pushed in `optimizer.step()`, so accumulation, clipping, gradient scaling and any torch optimizer for the rest work
    as ever. `model.parameters()` has one empty parameter for the table; give it to the optimizer with the others. Rows
    are not in `state_dict`: `fleet.save_persistables` writes them. Copies of the module read and train the same table.

    Under `torch.compile` the lookup is one graph break. An optimizer whose `step` takes a closure cannot train it.

    Args:
        dim: Values per row.
        entry: Which ids get a row: `CountFilter`, `Probability` or `ShowClick`; every trained id when None.
        optimizer: Rule of the rows (`phalanx.ps.Adagrad(0.05)`, ...) with its own learning rate; when None the rule and
            current learning rate of the torch optimizer that holds the parameter.
        init: Values of a row before training: `Uniform`, `Normal` or `Constant`.
        combiner: None. Pooling is `EmbeddingBag`'s: any other value is an error that says so.
        padding_idx: An id that reads as zeros and is not trained.
        name: Name of the table: modules of one name share it. The module's place in the model when None.
        dtype: Stored precision of the rows, `torch.float32` or `torch.bfloat16`. Results have the module's own dtype.
        seed: Seed of the initial values.
        max_bytes: Most bytes of memory the table may use on one server; no limit when None.
        evict: What happens to rows that `max_bytes` has no room for: "spill" moves those that were not used lately to
            files, and back when they are used; "drop" drops the least recently trained ones.
        file_dtype: How files hold the values of rows: `torch.float32`, or smaller and rounded as `torch.bfloat16` or
            `torch.int8`.
        unseen_days: Rows that were not trained for so many days go; `fleet.shrink()` ends a day. They stay when None.
            With any entry policy but `ShowClick`, which has its own.

    Raises:
        ConfigError: If an argument cannot work, or a table of this name has other settings.
    """

    def __init__(
        self,
        dim: int,
        *,
        entry: EntryPolicy | None = None,
        optimizer: Rule | None = None,
        init: Init | None = None,
        combiner: None = None,
        padding_idx: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str = torch.float32,
        seed: int = 0,
        max_bytes: int | None = None,
        evict: Literal["spill", "drop"] = "spill",
        file_dtype: torch.dtype | str = torch.float32,
        unseen_days: int | None = None,
    ) -> None:
        if combiner is not None:
            raise ConfigError(
                f"SparseEmbedding(combiner={combiner!r}) is now a module of its own. Write instead: "
                f"phalanx.ps.EmbeddingBag({dim}, mode={combiner!r})."
            )
        super().__init__(
            dim,
            entry=entry,
            optimizer=optimizer,
            init=init,
            padding_idx=padding_idx,
            name=name,
            dtype=dtype,
            seed=seed,
            max_bytes=max_bytes,
            evict=evict,
            file_dtype=file_dtype,
            unseen_days=unseen_days,
        )

    def forward(self, ids: Tensor, offsets: None = None, *, clicks: Tensor | None = None) -> Tensor:
        """Look up rows.

        Args:
            ids: Integers of any shape, or a nested tensor of layout `torch.jagged`.
            offsets: None. Bags are `EmbeddingBag`'s: any other value is an error that says so.
            clicks: How often each occurrence was clicked, shape of `ids`; for tables with `entry=ShowClick(...)`.

        Returns:
            Shape (*ids.shape, dim); jagged where `ids` are.

        Raises:
            ConfigError: If ids are no integers, or `clicks` have another shape.
        """
        return self._look_up(self.query(ids, offsets, clicks=clicks))

    @classmethod
    def from_torch(cls, module: nn.Embedding, *, name: str | None = None, **settings: Any) -> SparseEmbedding:
        """Return an embedding whose ids 0 to n - 1 start from the rows of an `nn.Embedding`; others from `init=`.

        On servers the rows of worker 0 count, and those that the servers have already.

        Args:
            module: It is copied. Device, dtype and `padding_idx` are taken over.
            name: Name of the table, which must be a new one.
            settings: Other arguments of `SparseEmbedding`.

        Raises:
            ConfigError: If a table cannot do what the module does, or there is a table of this name.
        """
        check_convertible(module, nn.Embedding, name)
        padding = module.padding_idx
        if padding is not None and module.weight[padding].any():
            raise ConfigError(
                f"row {padding} of the nn.Embedding, its padding_idx, is not zero, and padding reads as zeros from a "
                "table. Set the row to zero first."
            )
        embedding = cls(module.embedding_dim, padding_idx=padding, name=name, **settings)
        start_from_torch(embedding.handle, module.weight)
        return embedding.to(module.weight.device, module.weight.dtype)

    def to_torch(self, ids: int | Tensor) -> nn.Embedding:
        """Return an `nn.Embedding` with a copy of rows of the table.

        Args:
            ids: Ids of the rows, shape (n,): row i of the result is that of `ids[i]`. An int n for 0 to n - 1.

        Raises:
            ConfigError: If ids are no integers in one dimension, or occur twice.
        """
        rows, padding = rows_for_torch(self.handle, ids)
        embedding: nn.Embedding = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=padding)
        return embedding

    def query(self, ids: Tensor, offsets: None = None, *, clicks: Tensor | None = None) -> Query:
        """Return what a call of `forward` reads. See `TableModule.query`."""
        if offsets is not None:
            raise ConfigError(
                "offsets pool the rows of each sample, and a SparseEmbedding returns a row per id. Write instead: "
                f"phalanx.ps.EmbeddingBag({self.settings.dim}, mode='sum')(ids, offsets)."
            )
        check_ids(ids)
        flat, flat_clicks = values_of(ids, "ids"), None if clicks is None else values_of(clicks, "clicks")
        check_per_id("clicks", flat_clicks, flat)
        return Query(Feature(self.handle, flat, flat_clicks), jagged=ids if ids.is_nested else None)
