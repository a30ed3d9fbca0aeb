"""Models for use elsewhere: one file of weights, an exported program, ONNX. File names are exactly those given."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.checkpoint.export.optimizer_file import export_optimizer
from phalanx.checkpoint.export.whole_file import write_whole
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensors.local import MODEL, ModelView
from phalanx.checkpoint.tensors.write_plan import Entry, Part, deal_out
from phalanx.cluster.disk import named_errors
from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.parallel.checks.consistency import as_saved, make_consistent
from phalanx.parallel.model_shape import is_handle, is_module_held
from phalanx.parallel.session import ForwardWatch

logger = logging.getLogger("phalanx.checkpoint")

T = TypeVar("T")


def export_state_dict(model: nn.Module | Optimizer, path: str | Path) -> None:
    """Write a model's parameters and buffers as whole tensors to one safetensors file, whatever the Plan.

    Collective: every rank writes what it holds to its place in the file, so no rank needs memory for the whole.
    `px.load(path, model)` reads it, and so does `safetensors.torch.load_file(path)`.

    Args:
        model: The model, wrapped or not. Names are those of the plain model; a tensor with two names is written twice.
            Or an optimizer, of which its state and the options of its groups are written; `px.load(path, optimizer)`
            reads them.
        path: The file, seen by all ranks; replaced when the new one is whole. No ending is added to its name.

    Raises:
        ConfigError: If it is no module, a layer holds parts whose place nobody knows, or ranks' parameters differ; on
            all ranks.
        BackendError: If the file system does not take it; on all ranks.
        PeerLostError: If a rank did not come; names it.
    """
    if isinstance(model, Optimizer):
        export_optimizer(model, path)
        return
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "px.export_state_dict writes the weights of a torch.nn.Module or the state of a torch optimizer, found "
            f"{type(model).__name__}. Give the object itself, not its state_dict()."
        )
    ranks = Ranks.meet("px.export_state_dict", str(path))
    make_consistent(model, "px.export_state_dict")
    view = ModelView(model)
    held = dict(view.held())
    apart = sorted(name for name in held if not name.startswith(MODEL))

    def plan(said: list[Any]) -> tuple[dict[str, Entry], str]:
        if apart:
            raise ConfigError(
                f"{apart[0].rpartition('/')[2]!r} is a part, of its layer or of a rank that trains apart, whose place "
                "in the whole is not known. Give its layout in the Plan, or save with px.save."
            )
        return deal_out([{name: Part.from_json(part) for name, part in parts.items()} for parts in said]), ""

    write_whole(
        ranks,
        {name.removeprefix(MODEL): one for name, one in held.items()},
        Path(path),
        say=lambda: {name.removeprefix(MODEL): one.part.to_json() for name, one in held.items()},
        plan=plan,
        aliases=view.aliases,
    )


def export_program(model: nn.Module, inputs: tuple[Any, ...], path: str | Path, **options: Any) -> None:
    """Write a model as a program that `torch.export.load(path)` runs without its Python code, on any number of ranks.

    Collective: every rank calls it; rank 0 writes. Training or evaluation mode is as the model is now. The program
    takes batches of any number of rows; where the model's code fixes it, which is logged, of the sample's alone.

    Args:
        model: A model whose parameters are whole on every rank.
        inputs: Sample arguments of its forward pass, of 2 rows or more; tensors with as many rows as the first are
            taken as batches.
        path: The file, with any ending.
        options: Passed to `torch.export.export`. With `dynamic_shapes` it is you who says what may vary.

    Raises:
        ConfigError: If parameters are sharded, live in tables, or differ between ranks.
    """

    def write(plain: nn.Module) -> bytes:
        buffer = io.BytesIO()
        with torch.no_grad():
            program = _of_any_rows(inputs, options, lambda given, how: torch.export.export(plain, given, **how))
        torch.export.save(program, buffer)
        return buffer.getvalue()

    _export("px.export_program", model, Path(path), write)


def export_onnx(model: nn.Module, inputs: tuple[Any, ...], path: str | Path, **options: Any) -> None:
    """Write a model as ONNX.

    Collective: every rank calls it; rank 0 writes. Batches may have any number of rows as in `export_program`.

    Args:
        model: A model whose parameters are whole on every rank.
        inputs: Sample arguments of its forward pass.
        path: The file, with any ending.
        options: Passed to `torch.onnx.export`, such as `dynamic_shapes` and `input_names`.

    Raises:
        ConfigError: If parameters are sharded or live in tables, or onnxscript is not installed.
    """

    def write(plain: nn.Module) -> bytes:
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"export_onnx needs {' and '.join(missing)}, not installed here: pip install onnx onnxscript."
            )
        program = _of_any_rows(
            inputs, options, lambda given, how: torch.onnx.export(plain, given, dynamo=True, verbose=False, **how)
        )
        assert program is not None
        return bytes(program.model_proto.SerializeToString())

    _export("px.export_onnx", model, Path(path), write)


def _of_any_rows(
    inputs: tuple[Any, ...], options: dict[str, Any], export: Callable[[tuple[Any, ...], dict[str, Any]], T]
) -> T:
    """Return an exported model that takes any number of rows if it can be, and say so if it cannot."""
    rows = next((part.shape[0] for part in tree_leaves(inputs) if isinstance(part, Tensor) and part.dim()), None)
    if rows is None or "dynamic_shapes" in options or "kwargs" in options:
        return export(inputs, options)

    def shape_of(part: Any) -> dict[int, Any] | None:
        is_batch = isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == rows
        return {0: torch.export.Dim.DYNAMIC} if is_batch else None

    # Torch marks the tensors themselves: the user's stay unmarked, and so does what is exported otherwise.
    marked = tree_map(lambda part: part.detach() if isinstance(part, Tensor) else part, inputs)
    try:
        return export(marked, {**options, "dynamic_shapes": tree_map(shape_of, inputs)})
    except Exception as error:  # noqa: BLE001 -- torch has many, and what is no matter of shapes fails again below
        exported = export(inputs, options)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = next((line.strip(" -") for line in lines if line.startswith("  - ")), lines[0])
        logger.warning(
            "the program takes batches of %d rows alone: %s. For batches of any size let the sample have 2 rows or "
            "more and the model's code not fix their number, or say what may vary with dynamic_shapes=",
            rows,
            "torch takes 1 for a constant" if rows == 1 else why[:200].removesuffix("."),
        )
        return exported


def _export(verb: str, model: nn.Module, path: Path, write: Callable[[nn.Module], bytes]) -> None:
    ranks = Ranks.meet(verb, str(path))
    make_consistent(model, verb)

    def write_on_first(_: list[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part, data = path.with_name(f"{path.name}.{secrets.token_hex(4)}"), write(_plain_copy(model))
        with named_errors(part, len(data)):
            write_atomically(path, data, temporary=part)

    with as_saved(model):
        ranks.decide("export", lambda: _require_whole(model), write_on_first, timeout_s=WRITE_TIMEOUT_S)


def _require_whole(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.is_meta or isinstance(param, DTensor) or is_module_held(param) or is_handle(param):
            raise ConfigError(
                f"parameter {name!r} is not whole on every rank. Write the weights with px.export_state_dict, build "
                "the plain model, px.load the file into it with one process, and export that."
            )


def _plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model without what training has hung on it."""
    plain = copy.deepcopy(ModelView(model).model)
    plain._compiled_call_impl = None
    for key, hook in list(plain._forward_hooks.items()):
        if isinstance(hook, ForwardWatch):
            del plain._forward_hooks[key]
    for param in plain.parameters():
        param.grad = None
    return plain
