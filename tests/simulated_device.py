"""A device `sim` in Python, whose memory is not the CPU's: what mixes both fails as on a GPU, without one.

`install()` makes it torch's accelerator in this process, for good: call it in a rank of `run_ranks`. Its tensors are
of torch's key PrivateUse1. Their numbers lie in host memory, under the label of the device, and operators of the CPU
compute them there; an operator that gets tensors of both is refused in the words of CUDA, and so is `numpy()`. Not
simulated: streams (everything is done at once), several devices, memory that is freed below its tensor
(`untyped_storage().resize_`).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "sim"
HOST = torch.device("cpu")
_aten: Any = torch.ops.aten
_as_on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []
calls: list[str] = []
"""Operators that the device computed."""

INDICES = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operators that take indices from the host too, as CUDA's do."""


def install() -> torch.device:
    """Make the device, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # A module that moves keeps its parameter objects, as between the CPU and CUDA; torch does that for makers it knows.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = torch._C._swap_tensor_impl  # leaves class and attributes of the objects alone
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_compute, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    kernels = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "as_strided": _as_strided,
        "view": _view,
        "resize_": _resize,
        "_copy_from": _copy,
        "_local_scalar_dense": lambda tensor: _host(tensor).item(),
        "set_.source_Storage_storage_offset": _set_storage,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("linear", _linear_in_16_bits, "AutocastPrivateUse1")
    _libraries.extend((fallback, aten))
    return torch.device(NAME, 0)


def _is_ours(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the numbers of one of the device."""
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), HOST, memory.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_host(value: Any) -> Any:
    if _is_ours(value):
        return _host(value)
    return HOST if isinstance(value, torch.device) else value


def _labelled(host: Tensor) -> Tensor:
    """Return a tensor of the device over the memory of a CPU tensor."""
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), memory.nbytes())
    storage._memory = memory  # lives as long as the storage
    empty = torch._C._acc.create_empty_tensor((0,), host.dtype)
    return _set_storage(empty, storage, host.storage_offset(), host.size(), host.stride())


def _set_storage(tensor: Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    return _aten.set_.source_Storage_storage_offset.redispatch(_as_on_cpu, tensor, storage, offset, size, stride)


def _as_strided(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    return _aten.as_strided.default.redispatch(_as_on_cpu, tensor, size, stride, offset)


def _view(tensor: Tensor, size: Any) -> Tensor:
    host = _host(tensor).view(size)
    return _as_strided(tensor, host.size(), host.stride(), host.storage_offset())


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    larger = _labelled(torch.empty(size, dtype=tensor.dtype))
    return _set_storage(tensor, larger.untyped_storage(), 0, larger.size(), larger.stride())


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _labelled(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _labelled(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (_host(target) if _is_ours(target) else target).copy_(_host(source) if _is_ours(source) else source)
    return target


def _linear_in_16_bits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        dtype = torch.get_autocast_dtype(NAME)
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _check_devices(name: str, values: list[Any]) -> None:
    if name in INDICES or not any(map(_is_ours, values)):
        return
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"(in {name})"
            )


def _compute(function: Any, *args: Any, **named: Any) -> Any:
    """Compute an operator on the numbers of its arguments, and label what it returns."""
    schema = function._schema
    name = schema.name if not schema.overload_name else f"{schema.name}.{schema.overload_name}"
    calls.append(name)
    values, structure = tree_flatten((args, named))
    device = named.get("device")
    on_device = any(map(_is_ours, values)) if device is None else torch.device(device).type == NAME
    _check_devices(name, values)
    hosts = [
        _host(value) if _is_ours(value) else HOST if isinstance(value, torch.device) else value for value in values
    ]
    pairs = [(host, value) for host, value in zip(hosts, values, strict=True) if _is_ours(value)]
    host_args, host_named = tree_unflatten(hosts, structure)
    host_named.pop("pin_memory", None)
    outputs = {argument.name for argument in schema.arguments if argument.is_out} & named.keys()
    if outputs:
        return _compute_into(function, host_args, host_named, {key: named[key] for key in sorted(outputs)})
    result = function(*host_args, **host_named)
    return tree_map(lambda value: _returned(value, pairs), result) if on_device else result


def _compute_into(function: Any, args: Any, named: dict[str, Any], outputs: dict[str, Tensor]) -> Any:
    fresh = {key: torch.empty(0, dtype=tensor.dtype) for key, tensor in outputs.items()}
    function.overloadpacket(*args, **{**named, **fresh})  # torch hands over numbers where this overload takes tensors
    for key, tensor in outputs.items():
        if tensor.shape != fresh[key].shape:
            _resize(tensor, fresh[key].shape)
        _host(tensor).copy_(fresh[key])
    return next(iter(outputs.values())) if len(outputs) == 1 else tuple(outputs.values())


def _returned(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the argument that an operator changed in place, a view of one, or a new tensor."""
    if not isinstance(value, Tensor):
        return value
    for host, tensor in pairs:
        if host is value:
            return tensor
    address = value.untyped_storage().data_ptr()
    for host, tensor in pairs:
        if address and host.untyped_storage().data_ptr() == address:
            return _as_strided(tensor, value.size(), value.stride(), value.storage_offset())
    return _labelled(value)


class _Event:
    """A moment of the device, which does everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._seconds - self._seconds)


class _Module(backend_registration._DummyBackendModule):
    """What torch and `phalanx.accelerator` ask of the device: `torch.sim`."""

    Event = _Event

    def __init__(self) -> None:
        self._random = torch.Generator()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        self._random.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._random.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        assert state.device == HOST
        self._random.set_state(state)

    def get_device_name(self, index: int) -> str:
        return "a simulated device"

    def get_device_properties(self, device: Any) -> Any:
        return object()

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1 << 33, 1 << 34

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = memory_allocated

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass
