"""`SparseEmbedding`: an embedding over 64-bit ids, stored on the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.client.parameter import TableParameter, TableSettings, shared_parameter
from phalanx.ps.features import Feature, FeatureRows, read_features
from phalanx.ps.table.rules import EntryPolicy, Init, Uniform
from phalanx.ps.table.update_rules import SGD, Rule

Combiner = Literal["sum", "mean"]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}


class SparseEmbedding(nn.Module):
    """Looks up rows by id in a table that grows from empty: any 64-bit id has a row, derived from it until trained.

    Use it as `nn.Embedding` or, with a combiner, as `nn.EmbeddingBag`. Rows live on the parameter servers of the job,
    or in this process when there is one worker and no server. They are pulled in forward and their gradients pushed in
    `optimizer.step()`, so accumulation, clipping, gradient scaling and any torch optimizer for the rest work as ever.
    `model.parameters()` has one empty parameter for the table; give it to the optimizer with the others. Rows are not
    in `state_dict`: `fleet.save_persistables` writes them. Copies of the module read and train the same table.

    Under `torch.compile` the lookup is one graph break. An optimizer whose `step` takes a closure cannot train it.

    Args:
        dim: Values per row.
        entry: Which ids get a row: `CountFilter`, `Probability` or `ShowClick`; every trained id when None.
        optimizer: Rule of the rows (`phalanx.ps.Adagrad(0.05)`, ...) with its own learning rate; when None the rule and
            current learning rate of the torch optimizer that holds the parameter.
        init: Values of a row before training: `Uniform`, `Normal` or `Constant`.
        combiner: How rows of one sample combine (`sum` or `mean`); None gives a row per id.
        padding_idx: An id that reads as zeros, is not trained and does not count in a mean.
        name: Name of the table: modules of one name share it. The module's place in the model when None.
        dtype: Stored precision of the rows, `torch.float32` or `torch.bfloat16`. Results have the module's own dtype.
        seed: Seed of the initial values.
        max_bytes: Most bytes the table may use on one server; the least recently trained rows go first.

    Raises:
        ConfigError: If an argument cannot work, or a table of this name has other settings.
    """

    handle: TableParameter

    def __init__(
        self,
        dim: int,
        *,
        entry: EntryPolicy | None = None,
        optimizer: Rule | None = None,
        init: Init | None = None,
        combiner: Combiner | None = None,
        padding_idx: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str = torch.float32,
        seed: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if combiner not in (None, "sum", "mean"):
            raise ConfigError(f"combiner must be 'sum', 'mean' or None, found {combiner!r}.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype of rows must be torch.float32 or torch.bfloat16, found {dtype!r}.")
        self.combiner = combiner
        self.settings = _check_settings(
            dim=dim,
            optimizer=optimizer,
            entry=entry,
            init=init or Uniform(),
            dtype=DTYPES[dtype],
            seed=seed,
            max_bytes=max_bytes,
            padding_idx=padding_idx,
        )
        self._connect(name)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, *, clicks: Tensor | None = None) -> Tensor:
        """Look up rows.

        Args:
            ids: Integers. Any shape without a combiner; with one, (batch, ids per sample), or flat with `offsets`.
            offsets: Where each sample begins in flat `ids`, shape (batch,); needs a combiner.
            clicks: How often each occurrence was clicked, shape of `ids`; for tables with `entry=ShowClick(...)`.

        Returns:
            Shape (*ids.shape, dim) without a combiner, else (batch, dim).

        Raises:
            ConfigError: If ids are no integers, or shape, offsets and combiner do not fit each other.
        """
        self._check(ids, offsets)
        return self._pooled(self._read([Feature(self.handle, ids, clicks)])[0], offsets)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        fields = {"name": self.handle.table, "combiner": self.combiner, "optimizer": self.settings.optimizer}
        return ", ".join([str(self.settings.dim), *(f"{k}={v!r}" for k, v in fields.items() if v is not None)])

    def _connect(self, name: str | None) -> None:
        self.handle = shared_parameter(name, self.settings)
        # Imports torch's compiler, as every torch optimizer does when it is made.
        self._read: Callable[[Sequence[Feature]], list[FeatureRows]] = torch.compiler.disable(read_features)

    def _check(self, ids: Tensor, offsets: Tensor | None) -> None:
        if offsets is not None and self.combiner is None:
            raise ConfigError(
                "offsets pool the rows of each sample. Make the SparseEmbedding with combiner='sum' or 'mean'."
            )
        expected = None if self.combiner is None else 2 if offsets is None else 1
        if expected and ids.dim() != expected:
            raise ConfigError(
                f"combiner={self.combiner!r} takes ids of shape (batch, ids per sample), or flat ids with offsets; "
                f"found shape {tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets."
            )

    def _pooled(self, feature: FeatureRows, offsets: Tensor | None) -> Tensor:
        if self.combiner is None:
            return F.embedding(feature.index, feature.rows, padding_idx=feature.padding)
        if offsets is not None:
            offsets = offsets.to(feature.index.device)
        return F.embedding_bag(feature.index, feature.rows, offsets, mode=self.combiner, padding_idx=feature.padding)

    # Rows are in snapshots of the servers, not in state_dict; the parameter has nothing to save.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None: ...

    def _load_from_state_dict(self, *_args: Any) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_read"}
        return {**state, "_parameters": {}, "_table": self.handle.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = state.pop("_table")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect(name)


def lookup(features: Sequence[tuple[SparseEmbedding, Tensor]]) -> list[Tensor]:
    """Look up several features with one request for each server.

    Args:
        features: Modules and their ids, as their `forward` takes them.

    Returns:
        What each module's `forward` would return, in order.
    """
    for module, ids in features:
        module._check(ids, None)
    if not features:
        return []
    feature_rows = features[0][0]._read([Feature(module.handle, ids) for module, ids in features])
    return [module._pooled(f, None) for (module, _), f in zip(features, feature_rows, strict=True)]


_settings: dict[str, TypeAdapter[Any]] = {
    "optimizer": TypeAdapter(Rule | None),
    "entry": TypeAdapter(EntryPolicy | None),
    "init": TypeAdapter(Init),
}


def _check_settings(**settings: Any) -> TableSettings:
    """Return the settings, checked as a table's specification checks them."""
    for name, kind in _settings.items():
        try:
            kind.validate_python(settings[name])
        except ValidationError:
            examples = {"optimizer": "phalanx.ps.Adagrad(0.05)", "entry": "phalanx.ps.CountFilter(10)"}
            raise ConfigError(
                f"SparseEmbedding({name}=) takes a value such as {examples.get(name, 'phalanx.ps.Uniform(0.01)')}, "
                f"found {settings[name]!r}."
            ) from None
    checked = TableSettings(**settings)
    try:
        checked.spec("checked", checked.optimizer or SGD(lr=0.0))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"SparseEmbedding({first['loc'][0]}={first['input']!r}): {first['msg']}.") from None
    return checked
