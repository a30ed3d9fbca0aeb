"""`PlacedEmbedding`: an `nn.Embedding` whose rows a Plan stores in a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import PlanError
from phalanx.ps.client.parameter import TableParameter, TableSettings
from phalanx.ps.client.table_client import TableClient, current
from phalanx.ps.features import Feature, read_features
from phalanx.ps.gathers import rows_per_id
from phalanx.ps.table.rules import Constant


def place_embedding(module: nn.Embedding, name: str, client: TableClient) -> None:
    """Move an embedding's rows into a table, in place. Its weight keeps its identity and becomes a `TableParameter`.

    Args:
        module: The embedding; optimizers may hold its weight already.
        name: Name of the table.
        client: What ties this process to its tables.

    Raises:
        PlanError: If the module changes or weighs its rows in a way a table does not.
    """
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise PlanError(
                f"the Plan places an nn.Embedding with {option} in table {name!r}; tables do not do that. Build it "
                "without."
            )
    weight = module.weight
    values = weight.detach().to("cpu", torch.float32).clone()
    weight.data = weight.data.new_empty(0, module.embedding_dim)
    weight.__class__ = TableParameter
    assert isinstance(weight, TableParameter)
    weight.become(
        TableSettings(
            dim=module.embedding_dim,
            optimizer=None,
            entry=None,
            init=Constant(0.0),
            dtype="float32",
            seed=0,
            max_bytes=None,
            padding_idx=module.padding_idx,
        )
    )
    client.registry.name(weight, name)
    client.registry.start_from(weight, values)
    module.__class__ = PlacedEmbedding


class PlacedEmbedding(nn.Embedding):
    """An `nn.Embedding` whose rows are in a table. Made by `place_embedding`."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up rows; shape (*ids.shape, dim).

        Raises:
            IndexError: If an id is negative or not below `num_embeddings`.
        """
        out: Tensor = _look_up(self, ids)
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        ids = torch.arange(self.num_embeddings)
        (rows,) = current().pull([(_table_parameter(self), ids.numpy())])
        destination[prefix + "weight"] = torch.from_numpy(rows).to(self.weight.device, self.weight.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        missing: list[str] = more[2]
        key = prefix + "weight"
        if key in state_dict:
            current().registry.start_from(_table_parameter(self), state_dict[key].to("cpu", torch.float32))
        else:
            missing.append(key)


def _table_parameter(module: PlacedEmbedding) -> TableParameter:
    assert isinstance(module.weight, TableParameter)
    return module.weight


def _read(module: PlacedEmbedding, ids: Tensor) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < module.num_embeddings:
        raise IndexError(
            f"ids run from {int(ids.min())} to {int(ids.max())}, but there are {module.num_embeddings} rows."
        )
    (rows,) = read_features([Feature(_table_parameter(module), ids)])
    return rows_per_id(rows, ids.shape)


_look_up = torch.compiler.disable(_read)
