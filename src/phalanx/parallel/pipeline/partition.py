"""`record`, `owner_stages`: split a model's forward pass into pipeline stages, by symbolic tracing (torch.fx).

The forward pass is recorded once, symbolically, without data: calls of units and of other modules stay calls of these
same modules, so parameters, hooks, modes and whatever a technique put in a unit's place work in a stage as in the
model. What stands between units (activations, reshapes, residual sums) is recorded as it is and belongs to the stage
of the unit before it. A value made in one stage and used in a later one travels through all stages between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from phalanx.errors import PlanError
from phalanx.i18n import tr


@dataclass(frozen=True, slots=True)
class TracedForward:
    """A forward pass, each of its operations in a stage."""

    graph: fx.Graph
    where: dict[fx.Node, int]
    count: int
    constants: dict[str, Tensor]
    """Tensors that the forward pass made of nothing, by the names that the graph gave them."""

    def crossing(self, stage: int) -> list[fx.Node]:
        """Return the values that a stage passes on to the next, in the order of the forward pass."""
        return [
            node
            for node, own_stage in self.where.items()
            if own_stage <= stage and any(self.where[user] > stage for user in node.users)
        ]

    def inputs(self) -> list[fx.Node]:
        """Return the model's inputs."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def body(self, model: nn.Module, stage: int) -> fx.GraphModule:
        """Return one stage, over the modules and tensors that the model has now.

        Its arguments are the model's inputs in the first stage, else what the stage before passes on; it returns a list
        of what it passes on, and the last stage the model's output.
        """
        graph, copies = fx.Graph(), {}
        for node in self.inputs() if stage == 0 else self.crossing(stage - 1):
            copies[node] = graph.placeholder(node.name)
        for node, own_stage in self.where.items():
            if own_stage == stage and node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        is_last = stage == self.count - 1
        result = self.graph.output_node().args[0] if is_last else self.crossing(stage)
        graph.output(fx.map_arg(result, copies.__getitem__))
        targets = {node.target for node in graph.nodes if node.op in ("call_module", "get_attr")}
        return fx.GraphModule({target: _lookup(model, target, self.constants) for target in targets}, graph)


def record(model: nn.Module, stages: Mapping[str, int], count: int) -> TracedForward:
    """Record the forward pass of a model and say which stage each operation is in.

    Args:
        model: Any module; its parameters may be on the meta device.
        stages: Stage of each unit.
        count: Number of stages.

    Raises:
        PlanError: If the forward pass takes any number of inputs, cannot be recorded, or does not run through the units
            in the order of stages.
    """
    several = [
        parameter.name
        for parameter in _inputs_of(type(model).forward)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if several:
        raise PlanError(
            tr(
                "the forward pass of {model} cannot be split into stages, because it takes any number of inputs "
                "({names}). Name each of them in its signature.",
                model=type(model).__name__,
                names=", ".join(several),
            )
        )
    tracer, before = _StageTracer(tuple(stages)), set(vars(model))
    try:
        graph = tracer.trace(model)
    except Exception as error:  # the user's own forward runs on stand-ins, which may raise anything
        raise PlanError(
            tr(
                "the forward pass of {model} cannot be split into stages, because it looks at values while it runs: "
                "{why}. Move such code into one of its units ({units}), or write the model as a torch.nn.Sequential "
                "of them.",
                model=type(model).__name__,
                why=f"{type(error).__name__}: {error}",
                units=", ".join(stages),
            )
        ) from error
    finally:
        constants = {name: vars(model).pop(name) for name in set(vars(model)) - before}
    return TracedForward(graph, dict(_place(graph, stages, count)), count, constants)


def owner_stages(model: nn.Module, recorded: TracedForward, stages: Mapping[str, int]) -> dict[str, int]:
    """Return in which stage each parameter and buffer is, by every name it has.

    What is in no unit is where it is used first; what nothing uses is in the first stage.
    """
    used: dict[str, int] = {}
    for node, stage in recorded.where.items():
        if node.op in ("call_module", "get_attr"):
            used.setdefault(str(node.target), stage)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    return {name: _stage_of(name, stages, _stage_of(name, used, 0)) for name in names}


class _StageTracer(fx.Tracer):
    """Records down to units, and to whatever modules have none in them."""

    proxy_buffer_attributes = True

    def __init__(self, units: tuple[str, ...]) -> None:
        super().__init__()
        self.trace_asserts = True
        self._units = units

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of this module is recorded as such."""
        return not any(unit.startswith(f"{module_qualified_name}.") for unit in self._units)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Record the inputs that have to be given; the others keep their defaults."""
        needed = [parameter.name for parameter in _inputs_of(root_fn) if parameter.default is parameter.empty]
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in needed)]


def _inputs_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())[1:]  # without self


def _place(graph: fx.Graph, stages: Mapping[str, int], count: int) -> Iterator[tuple[fx.Node, int]]:
    now, unit_now = 0, ""
    for node in graph.nodes:
        target = str(node.target)
        stage = _stage_of(target, stages, None) if node.op in ("call_module", "get_attr") else None
        if stage is not None and (stage < now or (stage > now and node.op == "get_attr")):
            raise PlanError(
                tr(
                    "the forward pass uses {name!r} of stage {stage} while it is in stage {now} (after {unit!r}): it "
                    "does not run through the units in their order. Let pipeline_configs cuts keep in one stage what "
                    "is used together, or register the modules in the order in which they run.",
                    name=target,
                    stage=stage,
                    now=now,
                    unit=unit_now,
                )
            )
        if node.op == "call_module" and stage is not None:
            now, unit_now = stage, target
        yield node, count - 1 if node.op == "output" else 0 if node.op == "placeholder" else now


def _stage_of(name: str, stages: Mapping[str, int], default: Any) -> Any:
    """Return the stage of the innermost of these modules that holds what has this name."""
    while name:
        if name in stages:
            return stages[name]
        name = name.rpartition(".")[0]
    return default


def _lookup(model: nn.Module, target: str, constants: Mapping[str, Tensor]) -> Any:
    if target in constants:
        return constants[target]
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)
