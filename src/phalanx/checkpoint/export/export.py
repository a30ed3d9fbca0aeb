"""Export a model: full weights to safetensors, `torch.export` programs, ONNX."""

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

from phalanx.checkpoint.export.full_file import write_full_tensors
from phalanx.checkpoint.export.optimizer_file import export_optimizer
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensors.local_tensors import MODEL, ModelView
from phalanx.checkpoint.tensors.write_plan import ChunkDescription, TensorLayout, plan_writes
from phalanx.cluster.disk_space import named_errors
from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.parallel.checks.consistency import as_saved, make_consistent
from phalanx.parallel.checks.misuse import ForwardWatch
from phalanx.parallel.model_shape import is_handle, is_module_held

logger = logging.getLogger("phalanx.checkpoint")

T = TypeVar("T")


def export_state_dict(model: nn.Module | Optimizer, path: str | Path) -> None:
    """Write a model's full (unsharded) parameters and buffers to one safetensors file, whatever the Plan.

    Collective: every rank writes its shards at their offsets in the file, so no rank needs memory for the full model.
    `px.load(path, model)` reads it, and so does `safetensors.torch.load_file(path)`.

    Args:
        model: The model, wrapped or not. Names are those of the plain model; a tensor with two names is written twice.
            Or an optimizer, of which its state and the options of its groups are written; `px.load(path, optimizer)`
            reads them.
        path: The file, seen by all ranks; replaced once the new one is complete. No suffix is added to its name.

    Raises:
        ConfigError: If it is no module, a layer holds shards of unknown layout, or ranks' parameters differ; on all
            ranks.
        BackendError: If the file system does not take it; on all ranks.
        PeerLostError: If a rank did not arrive; names it.
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
    local_tensors = dict(view.local_tensors())
    per_rank = sorted(name for name in local_tensors if not name.startswith(MODEL))

    def plan(answers: list[Any]) -> tuple[dict[str, TensorLayout], str]:
        if per_rank:
            raise ConfigError(
                f"{per_rank[0].rpartition('/')[2]!r} is a shard of unknown layout, of its layer or of a rank that "
                "takes local steps. Set its layout in the Plan, or save with px.save."
            )
        return plan_writes(
            [{name: ChunkDescription.from_json(part) for name, part in parts.items()} for parts in answers]
        ), ""

    write_full_tensors(
        ranks,
        {name.removeprefix(MODEL): local for name, local in local_tensors.items()},
        Path(path),
        collect=lambda: {name.removeprefix(MODEL): local.part.to_json() for name, local in local_tensors.items()},
        plan=plan,
        aliases=view.aliases,
    )


def export_program(model: nn.Module, inputs: tuple[Any, ...], path: str | Path, **options: Any) -> None:
    """Write a model as a program that `torch.export.load(path)` runs without its Python code, on any number of ranks.

    Collective: every rank calls it; rank 0 writes. Training or evaluation mode is as the model is now. The batch
    size of the program is dynamic; where the model's code fixes it, which is logged, it is that of `inputs`.

    Args:
        model: A model whose parameters are unsharded on every rank.
        inputs: Example arguments of its forward pass, with a batch of 2 or more; tensors whose first dim equals that
            of the first one are batches.
        path: The file, with any suffix.
        options: Passed to `torch.export.export`. `dynamic_shapes` replaces the dynamic batch size.

    Raises:
        ConfigError: If parameters are sharded, live in tables, or differ between ranks.
    """

    def write(plain: nn.Module) -> bytes:
        buffer = io.BytesIO()
        with torch.no_grad():
            program = _with_dynamic_batch(
                inputs, options, lambda args, kwargs: torch.export.export(plain, args, **kwargs)
            )
        torch.export.save(program, buffer)
        return buffer.getvalue()

    _export("px.export_program", model, Path(path), write)


def export_onnx(model: nn.Module, inputs: tuple[Any, ...], path: str | Path, **options: Any) -> None:
    """Write a model as ONNX.

    Collective: every rank calls it; rank 0 writes. The batch size is dynamic as in `export_program`.

    Args:
        model: A model whose parameters are unsharded on every rank.
        inputs: Example arguments of its forward pass.
        path: The file, with any suffix.
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
        program = _with_dynamic_batch(
            inputs, options, lambda args, kwargs: torch.onnx.export(plain, args, dynamo=True, verbose=False, **kwargs)
        )
        assert program is not None
        return bytes(program.model_proto.SerializeToString())

    _export("px.export_onnx", model, Path(path), write)


def _with_dynamic_batch(
    inputs: tuple[Any, ...], options: dict[str, Any], export: Callable[[tuple[Any, ...], dict[str, Any]], T]
) -> T:
    """Return a model exported with a dynamic batch size, or log why its batch size is fixed."""
    rows = next((part.shape[0] for part in tree_leaves(inputs) if isinstance(part, Tensor) and part.dim()), None)
    if rows is None or "dynamic_shapes" in options or "kwargs" in options:
        return export(inputs, options)

    def shape_of(part: Any) -> dict[int, Any] | None:
        is_batch = isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == rows
        return {0: torch.export.Dim.DYNAMIC} if is_batch else None

    # torch marks the tensors themselves as dynamic: detached ones leave the user's unmarked for other exports.
    detached = tree_map(lambda part: part.detach() if isinstance(part, Tensor) else part, inputs)
    try:
        return export(detached, {**options, "dynamic_shapes": tree_map(shape_of, inputs)})
    except Exception as error:  # noqa: BLE001 -- torch raises many kinds; errors unrelated to shapes are raised again below
        exported = export(inputs, options)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = next((line.strip(" -") for line in lines if line.startswith("  - ")), lines[0])
        logger.warning(
            "the program takes batches of %d samples only: %s. For any batch size export with an example batch of 2 "
            "or more and a model that does not fix its size, or pass dynamic_shapes=",
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
        ranks.decide("export", lambda: _check_unsharded(model), write_on_first, timeout_s=WRITE_TIMEOUT_S)


def _check_unsharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.is_meta or isinstance(param, DTensor) or is_module_held(param) or is_handle(param):
            raise ConfigError(
                f"parameter {name!r} is not full on every rank. Write the weights with px.export_state_dict, build "
                "the plain model, px.load the file into it with one process, and export that."
            )


def _plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model without the hooks and gradients of training."""
    plain = copy.deepcopy(ModelView(model).model)
    plain._compiled_call_impl = None
    for key, hook in list(plain._forward_hooks.items()):
        if isinstance(hook, ForwardWatch):
            del plain._forward_hooks[key]
    for param in plain.parameters():
        param.grad = None
    return plain
