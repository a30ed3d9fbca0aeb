"""Optimizer step hooks in a fixed order of phases (`StepPhase`), for eager and compiled steps.

Whoever acts there names a phase, so the order of a script's calls does not matter. Actions up to `SKIP_OVERFLOW` decide
whether to update: torch's hooks cannot, so `step` itself is replaced on the one object; its class, hooks and schedulers
stay. All others run in torch's hooks, around steps that update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.parallel.session import OptimizerRecord, StepAction, StepPhase, optimizer_record, session
from phalanx.parallel.step.torch_scaler import admit_scaled


def add_action(
    optimizer: Optimizer,
    phase: StepPhase,
    run: Callable[[Optimizer], bool | None],
    *,
    needs_gradients: bool = False,
) -> None:
    """Do something at every step of an optimizer. Of one phase, actions run in the order in which they were added.

    Args:
        optimizer: Any torch optimizer. Its `step` takes no closure from now on if the phase decides about updates.
        phase: When.
        run: Called with the optimizer. One that decides returns whether to update; the rest is then left out if not. An
            error before the update stops the step.
        needs_gradients: Whether it acts on gradients before the update, so that `step` takes no closure from now on.
    """
    record = optimizer_record(optimizer)
    record.actions.append(StepAction(phase, run, needs_gradients))
    record.actions.sort(key=lambda action: action.phase)
    if phase.decides:
        record.gates = tuple(action.run for action in record.actions if action.phase.decides)
        replace_step(optimizer)
    elif not record.hook_handles:
        _register(optimizer, record, lambda hook: hook)


def list_phases(optimizer: Optimizer) -> tuple[str, ...]:
    """Return what a step of an optimizer does, in order."""
    record = session.optimizers.get(optimizer)
    phases = {StepPhase.UPDATE, *(() if record is None else (action.phase for action in record.actions))}
    return tuple(phase.name.lower().replace("_", " ") for phase in sorted(phases))


def keep_out_of_graph(optimizer: Optimizer) -> None:
    """Keep the hooks of an optimizer outside the graph when its step is compiled: they change the graph's inputs.

    (Marking them imports torch's compiler, which costs a second, so it is done only where a step is compiled.)
    """
    record = session.optimizers.get(optimizer)
    if record is not None and record.hook_handles:
        _register(optimizer, record, torch.compiler.disable)


def replace_step(optimizer: Optimizer) -> OptimizerRecord:
    """Let `optimizer.step()` ask the actions that decide before it updates by `record.update`."""
    record = optimizer_record(optimizer)
    if record.update is not None:
        return record
    original = optimizer.step
    # Unbound, so that nothing here keeps the optimizer alive; a scheduler's own wrapper is unbound already.
    update = record.update = getattr(original, "__func__", None) or _ignoring_self(original)

    @wraps(update)  # keeps the mark by which torch's schedulers know their wrapper
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None and record.gates:
            raise ConfigError(
                "optimizer.step(closure) was called, and a setting (gradient_merge, replicas, or amp with float16) may "
                "hold its update back, which a closure cannot know. Call backward() yourself, then step()."
            )
        record.has_updated = admit_scaled(self) and all(decide(self) for decide in record.gates)
        if not record.has_updated:
            return None
        self._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask for
        if closure is not None and record.wrap_closure is not None:
            closure = record.wrap_closure(closure)
        assert record.update is not None
        return record.update(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return record


def _ignoring_self(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def step(_: Optimizer, closure: Callable[[], float] | None) -> Any:
        return call(closure)

    return step


def _register(
    optimizer: Optimizer, record: OptimizerRecord, wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    for handle in record.hook_handles:
        handle.remove()
    record.hook_handles = (
        optimizer.register_step_pre_hook(wrap(lambda *call: _before_update(record, *call))),
        optimizer.register_step_post_hook(wrap(lambda *call: _after_update(record, *call))),
    )


def _before_update(record: OptimizerRecord, optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    has_closure = named.get("closure") or args[1:2] not in ((), (None,))
    record.has_closure = bool(has_closure)
    if has_closure and any(action.needs_gradients for action in record.actions):
        raise ConfigError(
            "optimizer.step(closure) was called, and a setting (clip, dgc, or amp in pure precision) acts on the "
            "gradients before the update, where a closure has not computed them. Call backward() yourself, then step()."
        )
    for action in record.actions:
        if action.phase < StepPhase.UPDATE and not action.phase.decides:
            action.run(optimizer)


def _after_update(record: OptimizerRecord, optimizer: Optimizer, _args: object, _named: object) -> None:
    for action in record.actions:
        if action.phase > StepPhase.UPDATE:
            action.run(optimizer)
