"""`PRIVATE_NAMES`: every private name of torch that the package uses; `python -m phalanx.torch_names` looks for them.

They may change with any release of torch. A test compares the list with the code, so that a new one is a decision, and
`.ci/torch_release` looks for all of them in another release.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

CHECKED_ON = ("2.13.0",)
"""Releases of torch in which all names were there."""

PRIVATE_NAMES: frozenset[str] = frozenset({
    "torch.UntypedStorage._new_shared",
    "torch.UntypedStorage._new_using_fd_cpu",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._distributed_c10d",
    "torch._C._distributed_c10d.TCPStore",
    "torch._C._error_if_any_worker_fails",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._storage_Use_Count",
    "torch._dynamo",
    "torch._dynamo.lookup_backend",
    "torch._dynamo.utils.counters",
    "torch._foreach_copy_",
    "torch._foreach_lerp_",
    "torch._foreach_norm",
    "torch._guards.detect_fake_mode",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.ops.aten._grouped_mm.default",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.distributed.Backend._plugins",
    "torch.distributed.distributed_c10d",
    "torch.distributed.distributed_c10d.AllgatherOptions",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.pipelining._backward.stage_backward_input",
    "torch.distributed.pipelining._backward.stage_backward_weight",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor._op_schema.OpSchema",
    "torch.multiprocessing._prctl_pr_set_pdeathsig",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._BatchNorm.forward",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.conv._ConvTransposeNd",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
})  # fmt: skip
"""From torch to the name."""

_SHARDING = "torch.distributed.fsdp._fully_shard."
PRIVATE_ATTRIBUTES: dict[str, str] = {
    "_call_impl": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_comm_ctx": _SHARDING + "_fsdp_state.FSDPState",
    "_compiled_call_impl": "torch.nn.Module",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_fsdp_param_groups": _SHARDING + "_fsdp_state.FSDPState",
    "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "_get_sequence_number_for_group": "torch.distributed.ProcessGroup",
    "_index_sampler": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "_is_view": "torch.Tensor",
    "_modules_to_run_forward": _SHARDING + "_fsdp_state.FSDPState",
    "_new_shared_fd_cpu": "torch.UntypedStorage",
    "_next_index": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_post_forward_indices": _SHARDING + "_fsdp_param_group.FSDPParamGroup",
    "_ragged_idx": "torch.nested._internal.nested_tensor.NestedTensor",
    "_reset": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "_sampler_iter": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "_scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch.ops.aten",
    "_schema": "torch._ops.OpOverload",
    "_sequence_nr": "torch._C._FunctionBase",
    "_set_sequence_number_for_group": "torch.distributed.ProcessGroup",
    "_state_ctx": _SHARDING + "_fsdp_state.FSDPState",
    "_step_supports_amp_scaling": "torch.optim.Adam",
    "_training_state": _SHARDING + "_fsdp_state.FSDPState",
}
"""Attributes of objects that torch makes, each with what has it."""


def missing_names() -> list[str]:
    """Return the names that the installed torch does not have."""
    full = [name for name in sorted(PRIVATE_NAMES) if not _exists(name)]
    missing = [f"{owner}.{name}" for name, owner in PRIVATE_ATTRIBUTES.items() if not _has_attribute(owner, name)]
    return full + missing


def _exists(name: str) -> bool:
    try:
        _resolve(name)
    except (AttributeError, ImportError):
        return False
    return True


def _resolve(name: str) -> Any:
    """Return what a full name stands for; raises AttributeError or ImportError if there is nothing."""
    module, *rest = name.split(".")
    value: Any = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(value, part):
            importlib.import_module(module)
        value = getattr(value, part)
    return value


def _has_attribute(owner: str, name: str) -> bool:
    """Return whether a class has an attribute, or its module's code sets it on objects."""
    if not _exists(owner):
        return False
    value = _resolve(owner)
    if hasattr(value, name):
        return True
    path = inspect.getsourcefile(value) if isinstance(value, type) else None
    text = Path(path).read_text(encoding="utf-8") if path else ""
    return re.search(rf"\bself\.{name}\b", text) is not None


def main() -> int:
    """Print the names that are missing; return 1 if there are any."""
    import torch

    missing = missing_names()
    count = len(PRIVATE_NAMES) + len(PRIVATE_ATTRIBUTES)
    sys.stdout.write("".join(f"{name}\n" for name in missing))
    sys.stdout.write(f"torch {torch.__version__}: {count - len(missing)} of {count} private names are there\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
