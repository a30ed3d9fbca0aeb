"""`find_repeated_blocks`: equal modules among captured operators; `merge_operators` makes coarser ones of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from phalanx.auto.capture.graph import Argument, Operator, Read, with_reads
from phalanx.plan.shape import ParamShape


def find_repeated_blocks(
    operators: Sequence[Operator], parameters: Iterable[ParamShape]
) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more modules whose forward operators, shapes, edges and inner modules are the same.

    A block computes with parameters more than once: single layers are none. Of blocks inside one another the outermost
    counts.

    Args:
        operators: Of a whole step.
        parameters: Of the model.
    """
    trainable = {param.name: param.trainable for param in parameters}
    inside = _inside(operators, {path for name in trainable for path in parent_paths(name)})
    alike: dict[str, list[str]] = defaultdict(list)
    for path in sorted(inside, key=lambda path: path.count(".")):
        if sum(1 for at in inside[path] if operators[at].parameters and operators[at].read_bytes) > 1:
            alike[_structure(path, inside[path], operators, trainable)].append(path)
    taken: set[str] = set()
    groups = []
    for paths in alike.values():
        members = [path for path in paths if taken.isdisjoint(parent_paths(path))]
        if len(members) > 1:
            taken.update(members)
            groups.append(tuple(sorted(members, key=lambda path: inside[path][0])))
    return tuple(sorted(groups, key=lambda group: inside[group[0]][0]))


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of some modules, or in one."""
    return not {path, *parent_paths(path)}.isdisjoint(modules)


def group_consecutive(
    operators: Sequence[Operator], alone: Callable[[Operator], bool]
) -> tuple[list[list[int]], list[int]]:
    """Return positions of operators that one call of a module ran in a row, and for each operator its run.

    Args:
        operators: Of a whole step. In backward, a run is of one run of the forward pass.
        alone: Which operators are a run each.
    """
    runs: list[list[int]] = []
    run_of: list[int] = []
    before: object = None
    for at, operator in enumerate(operators):
        origin = None if operator.origin is None else run_of[operator.origin]
        group = at if alone(operator) else (operator.phase, operator.module, operator.call, origin)
        if group == before:
            runs[-1].append(at)
        else:
            runs.append([at])
        run_of.append(len(runs) - 1)
        before = group
    return runs, run_of


def merge_operators(
    operators: Sequence[Operator], kinds: Mapping[str, str], keep: Callable[[Operator], bool]
) -> tuple[Operator, ...]:
    """Return a step in which operators that a module ran in a row are one, except those to keep.

    Args:
        operators: Of a whole step.
        kinds: Class of each module by path.
        keep: Which operators stay as they are.
    """
    runs, run_of = group_consecutive(operators, keep)
    leaves: list[dict[tuple[int, int], int]] = [{} for _ in runs]
    """Outputs that operators of other runs read, with their number in the run."""
    for at, operator in enumerate(operators):
        for read in operator.reads():
            if isinstance(read.source, int) and run_of[read.source] != run_of[at]:
                seen = leaves[run_of[read.source]]
                seen.setdefault((read.source, read.output), len(seen))

    def renumber(read: Read) -> Read:
        if isinstance(read.source, str):
            return read
        run = run_of[read.source]
        number = read.output if keep(operators[read.source]) else leaves[run][read.source, read.output]
        return Read(run, number, read.value)

    def one(run: int, members: list[int]) -> Operator:
        ops = [operators[at] for at in members]
        first, last_use = ops[0], run_of[max(op.last_use for op in ops)]
        temporary_until = run_of[max(op.temporary_until for op in ops)]
        origin = None if first.origin is None else run_of[first.origin]
        if keep(first):
            keywords = tuple((name, with_reads(value, renumber)) for name, value in first.keywords)
            arguments = tuple(with_reads(value, renumber) for value in first.arguments)
            return replace(
                first,
                arguments=arguments,
                keywords=keywords,
                temporary_until=temporary_until,
                last_use=last_use,
                origin=origin,
            )
        outside = (r for op in ops for r in op.reads() if isinstance(r.source, str) or run_of[r.source] != run)
        return Operator(
            name=kinds.get(first.module, first.phase) if first.phase != "loss" else "loss",
            module=first.module,
            call=first.call,
            phase=first.phase,
            origin=origin,
            arguments=tuple(dict.fromkeys(renumber(read) for read in outside)),
            outputs=tuple(operators[at].outputs[number] for at, number in leaves[run]) or ops[-1].outputs,
            parameters=tuple(dict.fromkeys(name for op in ops for name in op.parameters)),
            trained=tuple(name for op in ops for name in op.trained),
            flops=sum(op.flops for op in ops),
            read_bytes=sum(op.read_bytes for op in ops),
            written_bytes=sum(op.written_bytes for op in ops),
            saved_bytes=sum(op.saved_bytes for op in ops),
            returned_bytes=sum(op.returned_bytes for op in ops),
            returned_saved_bytes=sum(op.returned_saved_bytes for op in ops),
            temporary_bytes=sum(op.temporary_bytes for op in ops if run_of[op.temporary_until] != run),
            temporary_until=temporary_until,
            last_use=last_use,
            returned=any(op.returned for op in ops),
        )

    return tuple(one(run, members) for run, members in enumerate(runs))


def parent_paths(path: str) -> list[str]:
    """Return the paths of the modules around a module or parameter, without the whole model's."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _inside(operators: Sequence[Operator], modules: set[str]) -> dict[str, list[int]]:
    """Return the positions of the forward operators in each of some modules."""
    inside: dict[str, list[int]] = defaultdict(list)
    for at, operator in enumerate(operators):
        if operator.phase == "forward":
            for path in modules.intersection((*parent_paths(operator.module), operator.module)):
                inside[path].append(at)
    return inside


def _structure(path: str, inside: Sequence[int], operators: Sequence[Operator], trainable: Mapping[str, bool]) -> str:
    """Return a digest of a module's forward operators: its parameters and what comes from outside by number only."""
    position = {at: number for number, at in enumerate(inside)}
    numbers: dict[object, int] = {}

    def renamed(read: Read) -> Argument:
        if isinstance(read.source, int) and read.source in position:
            return ("inside", position[read.source], read.output, str(read.value))
        name = read.source.partition(":")[2] if isinstance(read.source, str) else ""
        own = name.startswith(path + ".")
        number = numbers.setdefault((read.source, read.output), len(numbers))
        return ("own" if own else "outside", number, trainable.get(name), str(read.value))

    digest = hashlib.sha256()
    for at in inside:
        operator = operators[at]
        arguments = [with_reads(value, renamed) for value in operator.arguments]
        keywords = [(name, with_reads(value, renamed)) for name, value in operator.keywords]
        call = (operator.module.removeprefix(path), numbers.setdefault((operator.module, operator.call), len(numbers)))
        digest.update(repr((operator.name, call, arguments, keywords, operator.outputs)).encode())
    return digest.hexdigest()
