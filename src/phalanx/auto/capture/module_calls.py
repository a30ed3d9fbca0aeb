"""`ModuleCall`: group captured operators by module call, the unit of planning."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.auto.capture.blocks import group_consecutive, is_inside, parent_paths
from phalanx.auto.capture.graph import CapturedStep, ExpertCall, Operator, Read, TensorShape
from phalanx.auto.capture.shard_propagation import ShardedDim, ShardedDims, propagate
from phalanx.plan.shape import ParamShape


@dataclass(frozen=True, slots=True)
class CallInput:
    """A tensor that a call reads, which is no parameter."""

    source: int | str
    """Position of the call that made it, or `sample:<number>`, `buffer:<name>`, `constant`."""

    value: TensorShape
    follows: bool
    """Whether a cut of the last dimension that passes the call cuts this too; see `ModuleCall.last_dim_parts`."""

    is_returned: bool = False
    """Whether the model returns it, or all of the memory that it is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """What one call of a module runs between the modules it calls."""

    path: str
    kind: str
    """Class of the module; `loss` for the loss function."""

    is_glue: bool
    """Whether it is what a module that calls others does itself; true for the loss too."""

    parameters: tuple[ParamShape, ...]
    """Those it reads, tied ones under their first name."""

    inputs: tuple[CallInput, ...]
    """Each once, in the order they are read; a residual addition has two."""

    outputs: tuple[TensorShape, ...]
    """What later calls read or, of the last ones, what the last operator makes."""

    saved_bytes: int
    """Of the activations it makes, those that autograd keeps for the backward pass, but for those returned."""

    returned_bytes: int
    """Of the activations it makes, those that the model returns."""

    returned_saved_bytes: int
    """Of these, those that autograd keeps for the backward pass too."""

    temporary_bytes: int
    """Bytes that are there while it runs, in the pass that has more, beside what it and the calls before it keep for
    the backward pass, and what the model returns: gradients of activations, and results that nothing keeps."""

    temporary_bytes_without_outputs: int
    """The same in a loop that lets go of what the model returns as soon as it has the loss: that counts here up to the
    end of the loss, unless autograd keeps it."""

    last_dim_parts: int
    """Cutting the last dimension of the inputs that follow into a number of parts that divides this cuts the last one
    of the outputs alike, without communication and with parameters whole. 0 if that does not pass, or is not known.

    Element-wise modules have the size of the dimension, attention with separate queries, keys and values its heads."""

    token_parts: int
    """The same of the dimension before the last, of a sequence. All inputs that calls made are cut so; they have
    three dimensions or more."""

    is_returned: bool
    """Whether the model returns a tensor that it makes, or nothing in the step reads any."""

    keeps_rows: bool
    """Whether each row of the outputs takes no more than the same row of the inputs. Rows are the first dimension of
    the sample, two or more, wherever they went. False for batch norm in training, for the loss, and if not known."""

    template: int
    """Position of the same call in the first block of a group of repeated ones; its own if it is in none."""

    operators: tuple[int, ...]
    """Positions of its operators in the captured step, forward."""

    experts: ExpertCall | None = None
    """What it computes, where it is a call of the experts of a mixture."""

    def without_outputs(self) -> ModuleCall:
        """Return the call in a loop that lets go of what the model returns as soon as it has the loss."""
        return replace(
            self,
            inputs=tuple(replace(source, is_returned=False) for source in self.inputs),
            saved_bytes=self.saved_bytes + self.returned_saved_bytes,
            returned_bytes=0,
            returned_saved_bytes=0,
            temporary_bytes=self.temporary_bytes_without_outputs,
        )


_ON_TOKENS = 3
"""Dimensions of an activation of tokens: rows, tokens, features."""


def list_module_calls(captured: CapturedStep) -> tuple[ModuleCall, ...]:
    """Return the calls of modules of a captured step in the order of the forward pass, the loss last.

    At level `hooks`, and for glue at level `modules`, operators are not known, and so nothing passes.
    """
    return _CallReader(captured).calls()


class _CallReader:
    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured
        self._ops = captured.operators
        runs, _ = group_consecutive(self._ops, lambda operator: False)
        self._runs = _merge_runs([run for run in runs if self._ops[run[0]].phase != "backward"], self._ops)
        self._run_of = {at: number for number, run in enumerate(self._runs) for at in run}
        self._read_later = self._outputs_read_later()
        self._temporary = self._temporary_bytes(return_outputs=True)
        self._temporary_outputs = self._temporary_bytes(return_outputs=False)
        self._rows, self._mixing = self._followed_rows()
        self._learned = self._list_learned()

    def calls(self) -> tuple[ModuleCall, ...]:
        kinds = dict(self._captured.modules)
        paths = {self._ops[run[0]].module for run in self._runs}
        callers = {caller for path in paths if path for caller in ("", *parent_paths(path))}
        params = {param.name: param for param in self._captured.parameters}
        like, calls = self._alike(), []
        for at, run in enumerate(self._runs):
            ops = [self._ops[n] for n in run]
            is_loss = ops[0].phase == "loss"
            parts, follow = self._passing(run)
            calls.append(
                ModuleCall(
                    path=ops[0].module,
                    kind="loss" if is_loss else kinds[ops[0].module],
                    is_glue=is_loss or ops[0].module in callers,
                    parameters=tuple(params[name] for name in dict.fromkeys(n for op in ops for n in op.parameters)),
                    inputs=tuple(self._input(read, follow(read)) for read in self._outside(run)),
                    outputs=tuple(self._ops[n].outputs[output] for n, output in self._outputs(run)),
                    saved_bytes=sum(op.saved_bytes for op in ops),
                    returned_bytes=sum(op.returned_bytes for op in ops),
                    returned_saved_bytes=sum(op.returned_saved_bytes for op in ops),
                    temporary_bytes=self._temporary[at],
                    temporary_bytes_without_outputs=self._temporary_outputs[at],
                    last_dim_parts=parts,
                    token_parts=self._token_parts(run),
                    is_returned=at not in self._read_later or any(op.returned for op in ops),
                    keeps_rows=self._mixing.isdisjoint(run),
                    template=like.get(at, at),
                    operators=tuple(run),
                    experts=ops[0].experts,
                )
            )
        return tuple(calls)

    def _temporary_bytes(self, *, return_outputs: bool) -> list[int]:
        """Return for each run the most bytes that are there beside what it and those before it keep.

        What a run keeps for the next alone is gone when its own gradients are computed.
        """
        saved = [sum(self._ops[at].saved_bytes for at in run) for run in self._runs]
        if not return_outputs:
            returned = (sum(self._ops[at].returned_saved_bytes for at in run) for run in self._runs)
            saved = [sum(sizes) for sizes in zip(saved, returned, strict=True)]
        after, most = list(itertools.accumulate(saved)), [0] * len(self._runs)
        for at, size in enumerate(self._captured.list_live_bytes(return_outputs=return_outputs)):
            origin = self._ops[at].origin
            run = self._run_of.get(at if origin is None else origin)
            if run is not None:
                most[run] = max(most[run], size - after[run])
        return most

    def _passing(self, run: Sequence[int]) -> tuple[int, Callable[[Read], bool]]:
        """Return the parts of a cut of the last dimension that passes, and which reads from outside it cuts.

        Tried are all activations, then those that have rows, then those that depend on parameters: positions, and masks
        of the samples, may be whole.
        """
        for follows in (_is_activation, lambda read: _is_activation(read) and self._has_rows(read), self._is_learned):
            parts = self._through(run, follows)
            if parts:
                return parts, follows
        return 0, lambda read: False

    def _token_parts(self, run: Sequence[int]) -> int:
        reads = [read for read in self._outside(run) if isinstance(read.source, int)]
        if not reads or any(len(read.value.shape) < _ON_TOKENS for read in reads):
            return 0
        return self._through(run, lambda read: isinstance(read.source, int), from_end=2)

    def _through(self, run: Sequence[int], follows: Callable[[Read], bool], from_end: int = 1) -> int:
        """Return the parts of a cut of a dimension, counted from the end, that leaves a run as it enters it."""
        state: dict[tuple[int, int], ShardedDim | None] = {}

        def find(read: Read) -> ShardedDim | None:
            if isinstance(read.source, int) and (read.source, read.output) in state:
                return state[read.source, read.output]
            shape = read.value.shape
            return (
                ShardedDim(len(shape) - from_end, shape[-from_end])
                if len(shape) >= from_end and follows(read)
                else None
            )

        for at in run:
            sharded_dims = propagate(self._ops[at], find)
            if sharded_dims is None:
                return 0
            state.update({(at, output): sharded for output, sharded in enumerate(sharded_dims)})
        ends = [(state[at, output], self._ops[at].outputs[output].shape) for at, output in self._outputs(run)]
        if not all(sharded and (sharded.dim, sharded.repeats) == (len(shape) - from_end, 1) for sharded, shape in ends):
            return 0
        return math.gcd(*(sharded.parts for sharded, _ in ends if sharded))

    def _followed_rows(self) -> tuple[dict[tuple[int, int], ShardedDim | None], set[int]]:
        """Return where the rows of the sample are in each output, and the operators that mix them."""
        sample = [read for op in self._ops for read in op.reads() if str(read.source).startswith("sample:")]
        first = min(sample, key=lambda read: str(read.source), default=None)
        count = first.value.shape[0] if first and first.value.shape else 0
        rows: dict[tuple[int, int], ShardedDim | None] = {}
        mixing = set()

        def find(read: Read) -> ShardedDim | None:
            if isinstance(read.source, int):
                return rows[read.source, read.output]
            is_cut = read.source.startswith("sample:") and read.value.shape[:1] == (count,)
            return ShardedDim(0, count) if is_cut else None

        for run in self._runs:
            for at in run:
                sharded_dims = propagate(self._ops[at], find)
                if sharded_dims is None:
                    mixing.add(at)
                    sharded_dims = _guess_rows(self._ops[at], find)
                rows.update({(at, output): sharded for output, sharded in enumerate(sharded_dims)})
        return rows, mixing

    def _has_rows(self, read: Read) -> bool:
        return isinstance(read.source, str) or self._rows[read.source, read.output] is not None

    def _is_learned(self, read: Read) -> bool:
        return read.source in self._learned

    def _list_learned(self) -> set[int | str]:
        """Return the operators whose outputs depend on parameters."""
        learned: set[int | str] = set()
        for at, operator in enumerate(self._ops):
            if operator.parameters or any(read.source in learned for read in operator.reads()):
                learned.add(at)
        return learned

    def _outputs_read_later(self) -> dict[int, list[tuple[int, int]]]:
        later: dict[int, dict[tuple[int, int], None]] = defaultdict(dict)
        for run in self._runs:
            for read in self._outside(run):
                if isinstance(read.source, int):
                    later[self._run_of[read.source]][read.source, read.output] = None
        return {run: list(outputs) for run, outputs in later.items()}

    def _outputs(self, run: Sequence[int]) -> list[tuple[int, int]]:
        return self._read_later.get(self._run_of[run[0]], [(run[-1], 0)] if self._ops[run[-1]].outputs else [])

    def _outside(self, run: Sequence[int]) -> Iterable[Read]:
        members = set(run)
        reads = (read for at in run for read in self._ops[at].reads())
        return dict.fromkeys(r for r in reads if r.source not in members and not str(r.source).startswith("parameter:"))

    def _input(self, read: Read, follows: bool) -> CallInput:
        if isinstance(read.source, str):
            return CallInput(read.source, read.value, follows)
        maker = self._ops[read.source]
        is_view = maker.returned and not maker.written_bytes
        is_returned = is_view or 0 < read.value.bytes <= maker.returned_bytes
        return CallInput(self._run_of[read.source], read.value, follows, is_returned)

    def _alike(self) -> dict[int, int]:
        paths = [self._ops[run[0]].module for run in self._runs]
        like: dict[int, int] = {}
        for group in self._captured.blocks:
            members = [[at for at, path in enumerate(paths) if is_inside(path, (block,))] for block in group]
            for member in members:
                like.update(zip(member, members[0], strict=True))
        return like


def _merge_runs(runs: Sequence[list[int]], operators: Sequence[Operator]) -> list[list[int]]:
    """Return runs, those that only one other run of the same call of a module reads together with it.

    Queries are reshaped before keys are computed, and belong to the attention all the same.
    """
    home = {at: run for run, members in enumerate(runs) for at in members}
    readers: dict[int, set[int]] = defaultdict(set)
    for at in home:
        for read in operators[at].reads():
            if isinstance(read.source, int) and home[read.source] != home[at]:
                readers[home[read.source]].add(at)
    gathered = [list(members) for members in runs]
    for run in reversed(range(len(runs))):
        others = {home[at] for at in readers[run]}
        if len(others) == 1 and _call(operators[runs[run][0]]) == _call(operators[runs[min(others)][0]]):
            home.update(dict.fromkeys(gathered[run], min(others)))
            gathered[min(others)][:0], gathered[run] = gathered[run], []
    return [members for members in gathered if members]


def _call(operator: Operator) -> tuple[str, str, int]:
    return operator.phase, operator.module, operator.call


def _is_activation(read: Read) -> bool:
    return isinstance(read.source, int) or read.source.startswith("sample:")


def _guess_rows(operator: Operator, find: Callable[[Read], ShardedDim | None]) -> ShardedDims:
    """Return where rows are after an operator that mixes them: where they were, in outputs of that size."""
    sizes = [(read.value.shape[sharded.dim], sharded) for read in operator.reads() if (sharded := find(read))]
    return tuple(
        next((sharded for size, sharded in sizes if output.shape[sharded.dim : sharded.dim + 1] == (size,)), None)
        for output in operator.outputs
    )
