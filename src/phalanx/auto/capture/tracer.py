"""`Tracer`: record the operators of a forward and backward pass (TorchDispatchMode)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from phalanx.auto.capture.expert_calls import ExpertCalls, read_expert_call
from phalanx.auto.capture.graph import Argument, Operator, Phase, Read, TensorShape
from phalanx.auto.capture.grouped_product import GROUPED, run_grouped_product
from phalanx.errors import ConfigError
from phalanx.i18n import tr

_aten = torch.ops.aten
_SUM = str(_aten.add.Tensor)
_SAME_VALUE = {_aten.detach.default, _aten.alias.default}
_MAKES_SPACE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_MOST_QUESTIONS = 10_000


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _recurrent(sequence: Any, inputs: Any, hidden: Any, *_: Any, **__: Any) -> int:
    """Every place of every row meets both matrices once; a weight of the LSTM holds those of its four gates."""
    return int(2 * sequence.shape[0] * sequence.shape[1] * (inputs.numel() + hidden.numel()))


def _recurrent_backward(*arguments: Any, **_: Any) -> int:
    return 2 * _recurrent(*arguments)


# torch counts those of GPUs only, if at all.
_FORMULAS = {
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(slots=True)
class _Memory:
    """A block of memory: who holds it or made it, and how many bytes of it are kept."""

    storage: Any  # held, so that no other memory takes its address
    owner: int | str
    size: int
    saved_bytes: int = 0
    is_gradient: bool = False
    """Whether it is the gradient of a parameter, or of one of its uses."""

    is_returned: bool = False
    """Whether the model returns it."""

    last_use: int = 0
    written_by: int = -1
    views: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)


class Tracer(TorchDispatchMode):
    """Records the operators inside the block. Under fake tensors, answers questions for values with made-up ones.

    Args:
        model: The module that runs, a copy; names are its paths.
        sample: The tensors of the sample, in order.
        mode: The fake tensors' mode; None where tensors have values.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, sample: Sequence[Tensor], mode: FakeTensorMode | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.questions: list[tuple[str, str]] = []
        """Operators that asked for a value that fake tensors do not have, and their modules."""

        self.experts: ExpertCalls = {}
        """Calls of experts. What runs inside, modules among it, counts as their own."""

        self._mode = mode
        self._model = model
        self._stack: list[tuple[str, int]] = []
        """Modules that run, and which call of each."""

        self._calls: Counter[str] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._node_of: dict[int, int] = {}
        """Numbers of autograd's nodes, and the position of the operator that each is of."""

        self._last_origin: int | None = None
        self._operators: list[dict[str, Any]] = []
        self._read_memory: list[list[_Memory]] = []
        """What each operator reads."""

        self._memory: dict[int, _Memory] = {}
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                self._memory_of(tensor, f"{kind}:{name}")
        for number, tensor in enumerate(sample):
            self._memory_of(tensor, f"sample:{number}")

    def operators(self) -> tuple[Operator, ...]:
        """Return what was recorded, in the order it ran."""
        saved, returned, returned_saved, temporary = ([0] * len(self._operators) for _ in range(4))
        last, until = list(range(len(self._operators))), list(range(len(self._operators)))
        for memory in self._memory.values():
            owner = memory.owner
            if isinstance(owner, int):
                last[owner] = max(last[owner], memory.last_use)
                if memory.is_returned:
                    returned[owner] += memory.size
                    returned_saved[owner] += memory.saved_bytes
                elif memory.saved_bytes:
                    saved[owner] += memory.saved_bytes
                elif not memory.is_gradient:
                    temporary[owner] += memory.size
                    until[owner] = max(until[owner], memory.last_use)
        return tuple(
            Operator(
                **fields,
                saved_bytes=saved[at],
                returned_bytes=returned[at],
                returned_saved_bytes=returned_saved[at],
                temporary_bytes=temporary[at],
                temporary_until=until[at],
                last_use=last[at],
            )
            for at, fields in enumerate(self._operators)
        )

    def returned(self, outputs: Any) -> None:
        """Take down what the model returns."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._find(tensor).is_returned = True
                read = self._argument(tensor)
                assert isinstance(read, Read)
                if isinstance(read.source, int):
                    self._operators[read.source]["returned"] = True

    def mark_gradients(self) -> None:
        """Note which operators train parameters, and the memory of their gradients.

        Each use of a parameter makes a gradient, and torch adds them up two at a time: gradients of uses, and sums of
        some of them, are marked too.
        """
        for at in {fields["origin"] for fields in self._operators} - {None}:
            fields = self._operators[at]
            if fields["phase"] == "forward" and fields["written_bytes"]:
                fields["trained"] = fields["parameters"]
        uses = Counter(name for fields in self._operators for name in fields.get("trained", ()))
        for name, param in self._model.named_parameters():
            if param.is_leaf and param.grad is not None:
                self._mark_gradient(self._find(param.grad), sums=uses[name] - 1)

    def _mark_gradient(self, memory: _Memory, sums: int) -> None:
        """Mark memory as a gradient and, if it comes from up to so many sums, what is added up."""
        marked = [memory]
        for addend in marked:
            addend.is_gradient = True
            if sums > 0 and isinstance(addend.owner, int) and self._operators[addend.owner]["name"] == _SUM:
                sums -= 1
                marked += [read for read in self._read_memory[addend.owner] if isinstance(read.owner, int)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules and what autograd saves inside the block."""
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no hooks: what it runs is its caller's
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, path)))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            with saved_tensors_hooks(self._saved, lambda tensor: tensor), self:
                yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("prim", "prims") or func in _SAME_VALUE:
            return func(*args, **kwargs)
        site = self._place()
        result = self._run(func, args, kwargs, site["module"])
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if outputs or inputs:
            self._note(func, args, kwargs, result, site)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, module: str) -> Any:
        if func is GROUPED and self._mode is not None:
            return run_grouped_product(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.questions.append((str(func), module))
            self._asked[str(func), module] += 1
            if len(self.questions) > _MOST_QUESTIONS:
                raise ConfigError(
                    tr(
                        "{module} asks {operator} for values without end",
                        module=module or tr("the model"),
                        operator=func,
                    )
                ) from None
            if isinstance(error, DynamicOutputShapeException):
                return self._all_rows(func, args, kwargs)
            return self._made_up(func, args, self._asked[str(func), module] % 2 == 0)

    def _made_up(self, func: Any, args: Any, answer: bool) -> bool | float:
        """Answer one for numbers, else no and yes in turn: loops end, and modules that are alike get the same."""
        tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if tensor.dtype is torch.bool or not str(func).startswith("aten._local_scalar_dense"):
            return answer
        return 1.0 if tensor.is_floating_point() else 1

    def _all_rows(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operator makes where it finds ones: all rows where rows are chosen."""
        assert self._mode is not None
        with torch.utils._python_dispatch._disable_current_modes():
            args, kwargs = tree_map_only(Tensor, lambda t: torch.ones(t.shape, dtype=t.dtype), (args, kwargs))
            answer = func(*args, **kwargs)
        return tree_map_only(Tensor, self._mode.from_tensor, answer)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, site: dict[str, Any]) -> None:
        at = len(self._operators)
        packet = getattr(func, "overloadpacket", func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        changed = _list_mutated(func, args, kwargs)
        memories = [self._find(tensor) for tensor in inputs]
        arguments = tuple(self._argument(value) for value in args)
        keywords = tuple((name, self._argument(value)) for name, value in sorted(kwargs.items()))
        self._read_memory.append(memories)
        for memory in memories:
            memory.last_use = at
        fresh = [tensor for tensor in outputs if _key(tensor) not in self._memory]
        moves = (fresh or changed) and packet not in _MAKES_SPACE
        formula: Any = _FORMULAS.get(packet) or flop_registry.get(packet)
        self._operators.append(
            {
                **site,
                "name": str(func),
                "arguments": arguments,
                "keywords": keywords,
                "outputs": tuple(_shape(tensor) for tensor in outputs),
                "parameters": tuple(dict.fromkeys(name for m in memories if (name := _parameter_name(m.owner)))),
                "flops": int(formula(*args, **kwargs, out_val=result)) if formula else 0,
                "read_bytes": sum(_bytes(tensor) for tensor in _distinct(inputs)) if moves else 0,
                "written_bytes": sum(_bytes(tensor) for tensor in (*fresh, *changed)) if moves else 0,
            }
        )
        for tensor in changed:
            self._find(tensor).written_by = at
        for output, tensor in enumerate(outputs):
            self._memory_of(tensor, at).views[_view(tensor)] = (at, output)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Tensor):
            memory = self._find(value)
            source, output = memory.views.get(_view(value), (memory.owner, 0))
            if isinstance(source, str) or source < memory.written_by:
                source, output = (memory.written_by, 0) if memory.written_by >= 0 else (memory.owner, 0)
            return Read(source, output, _shape(value))
        if isinstance(value, list | tuple):
            return tuple(self._argument(part) for part in value)
        if isinstance(value, bool | int | float | str) or value is None:
            return value
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return str(value)
        return type(value).__name__

    def _memory_of(self, tensor: Tensor, owner: int | str) -> _Memory:
        at = owner if isinstance(owner, int) else 0
        storage = _storage(tensor)
        return self._memory.setdefault(_key(tensor), _Memory(storage, owner, _storage_bytes(tensor), last_use=at))

    def _find(self, tensor: Tensor) -> _Memory:
        return self._memory_of(tensor, "constant")

    def _saved(self, tensor: Tensor) -> Tensor:
        memory = self._memory.get(_key(tensor))
        if memory is not None and self.phase != "backward":
            memory.saved_bytes = _storage_bytes(tensor)
        return tensor

    def _place(self) -> dict[str, Any]:
        """Return module, call, phase and origin of the operator that is about to run."""
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        if node is not None and not self._stack:
            self._last_origin = self._node_of.get(node._sequence_nr(), self._last_origin)
        if self.phase == "backward" and not self._stack and self._last_origin is not None:
            of = self._operators[self._last_origin]
            return {"module": of["module"], "call": of["call"], "phase": self.phase, "origin": self._last_origin}
        # autograd makes the node of an operator just before the operator runs
        self._node_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, len(self._operators))
        module, call = self._stack[-1] if self._stack else ("", 0)
        return {"module": module, "call": call, "phase": self.phase, "origin": None}

    def _enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        if self._stack and self._stack[-1] in self.experts:
            self._stack.append(self._stack[-1])
            return
        call = path, self._calls[path]
        self._stack.append(call)
        self._calls[path] += 1
        if (experts := read_expert_call(module, inputs)) is not None:
            self.experts[call] = experts

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()


def _parameter_name(owner: int | str) -> str:
    """Return the name of the parameter that an owner is, or nothing."""
    kind, _, name = str(owner).partition(":")
    return name if kind == "parameter" else ""


def _list_mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    tensors = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


def _storage(tensor: Tensor) -> Any:
    # Sparse tensors have no one storage; the tensor itself stands for it.
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.shape, tensor.dtype)
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _shape(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _storage_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that reading or writing a tensor moves; an expanded one lies in memory once."""
    return min(tensor.numel() * tensor.element_size(), _storage_bytes(tensor))


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({(_key(tensor), _view(tensor)): tensor for tensor in tensors}.values())
