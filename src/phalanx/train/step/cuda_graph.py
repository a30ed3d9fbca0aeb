"""`GraphedStep`: forward and backward pass captured as a CUDA graph.

The first steps run eagerly on a side stream, so that libraries make their workspaces and the optimizer its state; they
are steps like any other. Then the pass is captured with input buffers of its own; from then on a batch is copied into
these and the graph replayed (torch.cuda.CUDAGraph). The gradients' memory belongs to the graph. The optimizer's update
stays outside: learning rates may change and any optimizer will do. A batch of another shape (the last of an epoch) runs
eagerly.

What decides something by values, and so has to wait for them, cannot be captured; it is found in the first step and
named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.module_tracker import ModuleTracker

from phalanx.accelerator import CUDA, device_module
from phalanx.errors import ConfigError

Pass = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""From inputs and target to loss and named values; leaves gradients in the parameters."""

WARMUP_STEPS = 3
"""Eager steps before the capture."""


class GraphedStep:
    """A pass that is captured once and replayed. One rank, CUDA only.

    Args:
        run: The pass. What it does on the host happens in the first steps only.
        params: The parameters in which it leaves gradients.
    """

    def __init__(self, run: Pass, params: Iterable[nn.Parameter]) -> None:
        self._run = run
        self._params = list(params)
        self._gradients: list[Tensor | None] = []
        self._calls = 0
        self._shapes: list[Any] = []
        self._buffers: list[Any] = []
        self._graph: Any = None
        self._result: tuple[Tensor, dict[str, Tensor]] | None = None
        self.replays = 0
        """Steps that the graph ran."""

    def __call__(self, inputs: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Do what the pass does.

        Raises:
            ConfigError: If it cannot be captured; names the operation and the module.
        """
        self._calls += 1
        if self._calls == 1:
            with forbid_host_syncs():
                return self._run_on_side_stream(inputs, target)
        if self._calls <= WARMUP_STEPS:
            return self._run_on_side_stream(inputs, target)
        values, structure = tree_flatten((inputs, target))
        if self._graph is None:
            self._capture(values, structure)
        if _shapes(values) != self._shapes:
            return self._run(inputs, target)
        return self._replay(values)

    def _run_on_side_stream(self, inputs: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Run on a side stream, as a capture will."""
        cuda = device_module(torch.device(CUDA))
        main, side = cuda.current_stream(), cuda.Stream()
        side.wait_stream(main)
        with cuda.stream(side):
            result = self._run(inputs, target)
        main.wait_stream(side)
        return result

    def _capture(self, values: list[Any], structure: Any) -> None:
        self._shapes = _shapes(values)
        self._buffers = [value.clone() if isinstance(value, Tensor) else value for value in values]
        cuda = device_module(torch.device(CUDA))
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                loss, fetched = self._run(*tree_unflatten(self._buffers, structure))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"dataset_sink_mode captures the step as a CUDA graph, and torch could not: {error} Train with "
                "dataset_sink_mode=False, or take out what waits for the GPU."
            ) from error
        # Let go of autograd's graph: its memory is the captured graph's, which rewrites it.
        self._result = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, (loss, fetched))
        self._gradients = [param.grad for param in self._params]
        self._graph = graph

    def _replay(self, values: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._graph is not None
        for buffer, value in zip(self._buffers, values, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value, non_blocking=True)
        self._graph.replay()
        self.replays += 1
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient
        # The next replay writes over the graph's own.
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self._result)  # type: ignore[no-any-return]


def _shapes(values: list[Any]) -> list[Any]:
    return [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in values]


class forbid_host_syncs(TorchDispatchMode):  # noqa: N801 -- used as a function
    """Within it, operations whose result the host has to wait for are an error that names them.

    Raises:
        ConfigError: At such an operation: `.item()`, `if tensor:`, `nonzero`, indexing with booleans and the like.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker: Any = ModuleTracker()

    def __enter__(self) -> forbid_host_syncs:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _syncs_host(func, args):
            inside = max(self._tracker.parents - {"Global"}, key=len, default="")
            where = f" in {inside}" if inside else ""
            name = str(func).removeprefix("aten.").partition(".")[0]
            call = ".item(), float() or if" if name == "_local_scalar_dense" else name
            raise ConfigError(
                f"dataset_sink_mode captures the step as a CUDA graph, and {call}{where} makes the host wait for "
                "values on the GPU, which no graph can. Train with dataset_sink_mode=False, or compute it with "
                "torch.where."
            )
        return func(*args, **(kwargs or {}))


def _syncs_host(func: Any, args: Any) -> bool:
    """Return whether the host needs values before it can continue."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    tags = getattr(func, "tags", ())
    on_card = any(isinstance(value, Tensor) for value in tree_flatten(args)[0])
    return on_card and (torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags)
