"""`RoundBuffers`: the buffers of a model, which every logical replica of a global batch has to find alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError

Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers by module and name, which may get another tensor in each forward pass, and what they are to hold."""


class RoundBuffers:
    """The buffers of a model as a global batch found them, and as its first replica left them.

    Args:
        has_micro_batches: Whether the replicas of a global batch may make different numbers of forward passes.
    """

    def __init__(self, *, has_micro_batches: bool) -> None:
        self._has_micro_batches = has_micro_batches
        self._at_start: Buffers = []
        self._of_first: Buffers = []
        """Those that are not averaged."""

    @property
    def has_begun(self) -> bool:
        """Whether there are buffers to compare with."""
        return bool(self._at_start)

    def begin(self, model: nn.Module) -> None:
        """Remember the buffers of a model: a global batch begins."""
        self._at_start = copy_buffers(model)

    def restore(self) -> None:
        """Let the model hold them again, for the next replica."""
        write_buffers(self._at_start)

    def check_unchanged(self) -> None:
        """Raise if a forward pass that no backward pass followed has changed buffers.

        Raises:
            ConfigError: Names the buffer.
        """
        name = _differing(self._at_start, of_floats=True)
        if name is not None:
            raise ConfigError(
                f"a forward pass without a backward pass changed buffer {name}, while this rank holds several "
                "logical replicas, each of which begins with the same buffers. Call model.eval() before it."
            )

    def check_alike(self, model: nn.Module | None) -> None:
        """Raise if a replica leaves buffers that are not averaged otherwise than the first one did.

        Raises:
            ConfigError: Names the buffer.
        """
        if model is not None and not self._of_first:
            self._of_first = [entry for entry in copy_buffers(model) if not entry[2].is_floating_point()]
        elif self._has_micro_batches:
            write_buffers(self._of_first)  # replicas with other numbers of rows are cut into other numbers of those
        elif (name := _differing(self._of_first, of_floats=False)) is not None:
            raise ConfigError(
                f"buffer {name} differs between the logical replicas of this rank, and only floating-point buffers are "
                "averaged. Make it one, or start as many ranks as there are replicas."
            )

    def clear(self) -> None:
        """Forget them: the global batch is over."""
        self._at_start.clear()
        self._of_first.clear()


def copy_buffers(model: nn.Module) -> Buffers:
    """Return copies of the buffers of a model."""
    return [
        (module, name, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]


def write_buffers(buffers: Buffers) -> None:
    """Let modules hold what was copied."""
    for module, name, value in buffers:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.data.copy_(value)  # .data leaves the version counter alone: a graph may have saved the buffer
        else:
            module._buffers[name] = value.clone()


def _differing(buffers: Buffers, *, of_floats: bool) -> str | None:
    """Return the name of a buffer that does not hold its value."""
    for module, name, value in buffers:
        buffer = module._buffers.get(name)
        if (of_floats or not value.is_floating_point()) and (buffer is None or not torch.equal(buffer, value)):
            return f"{name!r} of {type(module).__name__}"
    return None
