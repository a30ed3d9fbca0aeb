"""`OperatorWatch`: while a step is computed again, find the first operator that makes NaN or infinity."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.batch.loaded_batches import tensors_in
from phalanx.comm.local.script_line import script_line
from phalanx.parallel.numerics.origin import WHOLE_MODEL, is_finite

_MASKS = frozenset(
    ["masked_fill", "masked_fill_", "where", "full", "full_like", "fill_", "fill", "scalar_tensor", "triu"]
)
"""Operators that are asked for infinities, as attention masks do."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One operator whose result is not finite though what it was given is."""

    module: str
    operator: str
    line: str
    result: Tensor


class OperatorWatch(TorchDispatchMode):
    """Looks at every operator that runs inside the block.

    Args:
        model: Names its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._nodes: list[int] = []
        self._of_nodes: list[tuple[str, str, str]] = []
        """Module, operator and line in the forward pass, by the number of the node that autograd made of it."""

        self.nan: Sighting | None = None
        self.infinity: Sighting | None = None
        self.module_output: Sighting | None = None
        """Of the first module whose output is not finite; where operators are not watched it is all there is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and look at its result."""
        kwargs = kwargs or {}
        node: Any = torch._C._current_autograd_node()
        is_clean = all(is_finite(t) for t in tensors_in((args, tuple(kwargs.values())))) if self.nan is None else True
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if node is None:
            self._remember(name)
        if self.nan is None:
            self._look(func, name, result, node, is_clean=is_clean)
        return result

    def _remember(self, operator: str) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if not self._nodes or number > self._nodes[-1]:
            self._nodes.append(number)
            self._of_nodes.append((self._module(), operator, script_line()))

    def _look(self, func: Any, name: str, result: Any, node: Any, *, is_clean: bool) -> None:
        if getattr(func, "namespace", "") != "aten" or name.startswith(("empty", "new_empty")):
            return  # memory that nobody wrote yet, and what only moves bytes
        for tensor in tensors_in(result):
            if is_finite(tensor):
                continue
            is_nan = bool(torch.isnan(tensor).any())
            if is_nan and self.infinity is None:
                self.nan = self._sighting(name, tensor, node)
            elif is_nan:
                self.nan = self.infinity  # of which it was made
            elif self.infinity is None and is_clean and name not in _MASKS:
                self.infinity = self._sighting(name, tensor, node)
            return

    def _sighting(self, operator: str, result: Tensor, node: Any) -> Sighting:
        if node is None:
            return Sighting(self._module(), operator, script_line(), result.detach())
        at = bisect.bisect_left(self._nodes, node._sequence_nr() + 1)
        module, forward, line = self._of_nodes[min(at, len(self._of_nodes) - 1)] if self._nodes else ("", "", "")
        return Sighting(module, f"{node.name()} (the backward pass of {forward}): {operator}", line, result.detach())

    def _module(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module computes, as long as the block lasts."""

        def enter(module: nn.Module, _args: Any) -> None:
            name = self._names.get(id(module))
            label = f"{name or WHOLE_MODEL} ({type(module).__name__})" if name is not None else self._module()
            self._stack.append(label)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            bad = next((tensor for tensor in tensors_in(output) if not is_finite(tensor)), None)
            if bad is not None and self.module_output is None:
                self.module_output = Sighting(self._module(), "", "", bad.detach())
            if self._stack:
                self._stack.pop()

        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
