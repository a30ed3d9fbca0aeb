"""`ModelPasses`: the first lookup of a model's forward pass pulls the rows of its other lookups with its own.

A model that calls its modules one after the other would wait for one request per call. While it computes, it is noted
which arguments of the model the ids of each call are views of. Once two passes agree on that, the first call of a pass
that needs rows also asks for those of the calls to come. Each of these then takes its rows if its ids have the expected
values and this process has pushed nothing since; else it pulls by itself. So no pass makes more requests than calls,
and each call gets the rows that a pull of its own could have got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.ps.argument_view import ArgumentView, tensors_in, view_in
from phalanx.ps.client.parameter import TableParameter
from phalanx.ps.client.table_client import TableClient, current
from phalanx.ps.features import Feature, FeatureReads
from phalanx.ps.stores.base import Rows
from phalanx.ps.stores.dedup import unique

CallKey = tuple[tuple[int, ...], int]
"""A call: the tables it reads, by the identity of their parameters, and how many calls read these before it."""

CallViews = tuple[tuple[TableParameter, ArgumentView], ...]
"""What each feature of a call reads."""


class ModelPasses:
    """The forward passes of one model.

    Args:
        model: Its calls are followed from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last: dict[CallKey, CallViews] = {}
        self._expected: dict[CallKey, CallViews] = {}
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": {}, "_expected": {}}  # a copy of the model learns by itself

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            current().model_passes.append(ModelPass(self, (args, kwargs), self._expected))

    def _end(self, *_of_call: object) -> None:
        if torch.compiler.is_compiling():
            return
        passes = current().model_passes
        if passes and passes[-1].owner is self:
            views = passes.pop().views
            self._expected = {key: call for key, call in views.items() if self._last.get(key) == call}
            self._last |= views


@dataclass(slots=True)
class _PulledCall:
    """The rows of a call to come."""

    reads: FeatureReads
    arrays: list[Rows]


class ModelPass:
    """One forward pass of a model.

    Args:
        owner: The passes of the model.
        arguments: Of the pass.
        expected: The calls that it is expected to make, in their order.
    """

    def __init__(self, owner: ModelPasses, arguments: object, expected: Mapping[CallKey, CallViews]) -> None:
        self.owner = owner
        self.views: dict[CallKey, CallViews] = {}
        """What the calls so far read, as far as they read arguments."""

        self._arguments, self._expected = arguments, dict(expected)
        self._counts: dict[tuple[int, ...], int] = {}
        self._tensors: dict[Any, Tensor] | None = None
        self._paths_of_memory: dict[int, list[Any]] | None = None
        self._pulled: dict[CallKey, _PulledCall] = {}
        self._version: object = None

    def read(self, features: Sequence[Feature], client: TableClient) -> tuple[FeatureReads, list[Rows]]:
        """Return the unique ids of a call and their rows, pulled before or now."""
        key = self._next_key(features)
        client.end_dropped_step()
        if self._version != client.version:
            self._pulled.clear()
        pulled = self._pulled.pop(key, None)
        if pulled is not None and pulled.reads.is_of(features):
            return pulled.reads, pulled.arrays
        reads = FeatureReads(features)
        others = self._reads_to_come(client)
        arrays, *arrays_of_others = pull_together([reads, *others.values()], client)
        self._pulled |= {
            other: _PulledCall(others[other], rows) for other, rows in zip(others, arrays_of_others, strict=True)
        }
        self._version = client.version
        return reads, arrays

    def _next_key(self, features: Sequence[Feature]) -> CallKey:
        tables = tuple(id(feature.parameter) for feature in features)
        key = tables, self._counts.get(tables, 0)
        self._counts[tables] = key[1] + 1
        self._expected.pop(key, None)
        views = [self._view_of(feature.ids) for feature in features]
        present = [view for view in views if view is not None]
        if len(present) == len(features):
            self.views[key] = tuple((f.parameter, v) for f, v in zip(features, present, strict=True))
        return key

    def _reads_to_come(self, client: TableClient) -> dict[CallKey, FeatureReads]:
        """Return what the calls to come will read, as far as their tables are made and it is not pulled yet."""
        reads = {}
        for key, views in self._expected.items():
            if key in self._pulled or not all(client.registry.is_declared(parameter) for parameter, _ in views):
                continue
            features = [(parameter, self._tensor_at(view)) for parameter, view in views]
            # Copies: a model may change its ids before the call, which shall not have the rows of the former ones then.
            complete = [Feature(parameter, ids.clone()) for parameter, ids in features if ids is not None]
            if len(complete) == len(features):
                reads[key] = FeatureReads(complete)
        return reads

    def _view_of(self, ids: Tensor) -> ArgumentView | None:
        if self._paths_of_memory is None:
            self._paths_of_memory = {}
            for path, tensor in self._argument_tensors().items():
                self._paths_of_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)
        for path in self._paths_of_memory.get(ids.untyped_storage().data_ptr(), ()):
            if (view := view_in(path, self._argument_tensors()[path], ids)) is not None:
                return view
        return None

    def _tensor_at(self, view: ArgumentView) -> Tensor | None:
        tensor = self._argument_tensors().get(view.path)
        return None if tensor is None else view.of(tensor)

    def _argument_tensors(self) -> dict[Any, Tensor]:
        if self._tensors is None:
            self._tensors = dict(tensors_in(self._arguments))
        return self._tensors


def pull_together(calls: Iterable[FeatureReads], client: TableClient) -> list[list[Rows]]:
    """Return the rows of several calls, pulled at once; each call's arrays are its own.

    Returns:
        Per call one (n, dim) array per table that it reads.
    """
    reads = list(calls)
    keys: dict[TableParameter, list[Any]] = {}
    for call in reads:
        for parameter, of_call in call.pull_specs:
            keys.setdefault(parameter, []).append(of_call)
    merged = {parameter: unique(parts) if len(parts) > 1 else None for parameter, parts in keys.items()}
    specs = [(parameter, keys[parameter][0] if (m := merged[parameter]) is None else m[0]) for parameter in keys]
    rows = dict(zip(keys, client.pull(specs), strict=True))
    begins = dict.fromkeys(keys, 0)
    arrays: list[list[Rows]] = []
    for call in reads:
        arrays.append([])
        for parameter, of_call in call.pull_specs:
            start, merge = begins[parameter], merged[parameter]
            begins[parameter] = start + len(of_call)
            whole = rows[parameter]
            arrays[-1].append(whole if merge is None else np.take(whole, merge[1][start : begins[parameter]], axis=0))
    return arrays
