"""`capture`: trace a training step (forward, loss, backward) with fake tensors.

The step runs once under fake tensors, which have shapes and no values. Where the model asks for values, answers are
made up, and what depends on them is told module by module only. `docs/design/capture.md` says how.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from phalanx.auto.capture.blocks import find_repeated_blocks, is_inside, merge_operators
from phalanx.auto.capture.expert_calls import ExpertCalls, count_chosen_tokens
from phalanx.auto.capture.fake_copy import (
    check_dummy_memory,
    copy_parts,
    make_dummy,
    preserve_rng_state,
    resolve_meta_device,
    separate_tensors,
)
from phalanx.auto.capture.graph import LEVELS, CapturedStep, Level, Operator
from phalanx.auto.capture.operator_sites import find_mismatch
from phalanx.auto.capture.tracer import Tracer
from phalanx.data.loader.binding import Inputs, LossFunction, bind_argument, entry_of
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr
from phalanx.parallel.session import model_record
from phalanx.plan.shape import ParamShape

logger = logging.getLogger("phalanx.auto")


def capture(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None = None, level: Level | None = None
) -> CapturedStep:
    """Return forward, loss and backward pass of a model on a batch: operators, bytes, what is kept, repeated blocks.

    Nothing is changed: not the model, its buffers, its gradients nor random numbers; and nothing real is computed.
    Modules stay in the mode they are in, training or evaluation.

    Args:
        model: Any module, on any device that torch can name, `meta` among them.
        sample: A batch: a tensor, a tuple or list of arguments, or a dictionary of keyword arguments. With a loss, a
            tuple or list whose last column is the target; the one before it may be a dictionary of keyword arguments.
            Only shapes and dtypes count.
        loss_fn: Takes the model's output and the target. Without, gradients start at the output that the model calls
            `loss` or, if there is none, at all outputs.
        level: The level to tell; by default the best that the model allows. See `CapturedStep.level`.

    Returns:
        The step. Its `level` is the one that was asked for or, without, the best.

    Raises:
        ConfigError: If the model cannot run on the sample, or does not allow the level.
    """
    if level is not None and level not in LEVELS:
        levels = ", ".join(LEVELS)
        raise ConfigError(
            tr(
                "capture knows the levels {known}, not {level!r}.{nearest}",
                known=levels,
                level=level,
                nearest=suggest(level, LEVELS),
            )
        )
    inputs = separate_tensors(arguments_of(model, sample, has_target=loss_fn is not None))
    seen, reasons = _trace(model, inputs, loss_fn)
    parameters = tuple(_shape(name, param) for name, param in model.named_parameters())
    blocks = find_repeated_blocks(seen.operators, parameters)
    best = _best_level(seen, blocks, reasons)
    if level is not None and LEVELS.index(level) < LEVELS.index(best):
        raise ConfigError(
            tr(
                "capture was asked for level {level!r}, the model allows {best!r}: {why}",
                level=level,
                best=best,
                why="; ".join(reasons),
            )
        )
    for reason in reasons:
        logger.info("captured %s as %s, not %s", type(model).__name__, best, reason)
    actual_level = level or best
    modules = tuple((path, type(module).__name__) for path, module in model.named_modules())
    captured = CapturedStep(
        level=actual_level,
        reasons=tuple(reasons),
        operators=_operators_at_level(actual_level, seen, blocks, dict(modules)),
        modules=modules,
        parameters=parameters,
        buffers=tuple(_shape(name, buffer, trainable=False) for name, buffer in model.named_buffers()),
        tied=_tied(model),
        blocks=blocks,
    )
    model_record(model).captured_step = partial(find_mismatch, captured)
    return captured


class Arguments(NamedTuple):
    """What a model is called with, and what its loss takes beside the output; a sample for `capture`."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any = None

    @classmethod
    def of(cls, inputs: Inputs, target: Any = None) -> Arguments:
        """Return the arguments of a model that is called with these inputs."""
        return cls((), inputs, target) if isinstance(inputs, dict) else cls(inputs, {}, target)


@dataclass(frozen=True, slots=True)
class _Trace:
    """What a pass showed."""

    operators: tuple[Operator, ...]
    experts: ExpertCalls
    questions: list[tuple[str, str]] | None
    """Those of others than experts, of which one operator says all; None if the pass was not under fake tensors."""


def arguments_of(model: nn.Module, sample: Any, *, has_target: bool) -> Arguments:
    """Return how a model is called on a sample, and its target."""
    if isinstance(sample, Arguments):
        return sample
    if has_target:
        if not isinstance(sample, tuple | list) or len(sample) < 2:
            size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise ConfigError(
                tr(
                    "capture with a loss takes a sample (input, ..., target), found a {found}. Put the target last, "
                    "or leave loss_fn out.",
                    found=f"{type(sample).__name__}{size}",
                )
            )
        inputs = bind_argument(model, sample[0]) if len(sample) == 2 else tuple(sample[:-1])
        return Arguments.of(inputs, sample[-1])
    if isinstance(sample, Mapping):
        return Arguments((), dict(sample))
    return Arguments(tuple(sample) if isinstance(sample, tuple | list) else (sample,), {})


def list_gradient_roots(outputs: Any) -> list[Tensor]:
    """Return the tensors at which the backward pass of a model starts that was called without a loss function."""
    own = entry_of(outputs, "loss")
    leaves = tree_leaves(outputs if own is None else own)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _trace(model: nn.Module, inputs: Arguments, loss_fn: LossFunction | None) -> tuple[_Trace, list[str]]:
    """Return what a pass under fake tensors showed or, where there is no such pass, one on dummies."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((inputs.positional, inputs.keywords, inputs.target))]
    mode = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with _mute_fake_tensor_log():
            return _run_step(model, inputs, loss_fn, mode), []
    except Exception as error:  # noqa: BLE001  # a model's own code may raise anything
        reason = _first_line(error)
    check_dummy_memory((model, inputs.positional, inputs.keywords, inputs.target), reason)
    try:
        return _run_step(model, inputs, loss_fn, None), [f"{name}: {reason}" for name in LEVELS[:2]]
    except Exception as error:
        advice = _advice(model, inputs)
        name, dummies = type(model).__name__, _first_line(error)
        raise ConfigError(
            tr(
                "capture runs {model} on tensors with the shapes of the sample, and it failed: {why}; on dummies: "
                "{dummies}. {advice}",
                model=name,
                why=reason,
                dummies=dummies,
                advice=advice,
            )
        ) from error


def _advice(model: nn.Module, inputs: Arguments) -> str:
    """Return what to do about a model that does not run on its sample."""
    tensors = [*model.parameters(), *model.buffers()]
    sample_tensors = [
        tensor
        for tensor in tree_leaves((inputs.positional, inputs.keywords, inputs.target))
        if isinstance(tensor, Tensor)
    ]
    devices, others = (
        sorted({str(tensor.device) for tensor in tensors}),
        sorted({str(tensor.device) for tensor in sample_tensors}),
    )
    if len({*devices, *others} - {"meta"}) > 1:
        return tr(
            "The model is on {model}, the sample on {sample}: put them on one device.",
            model=", ".join(devices),
            sample=", ".join(others),
        )
    return tr("Pass what one training step takes.")


def _run_step(model: nn.Module, inputs: Arguments, loss_fn: LossFunction | None, mode: FakeTensorMode | None) -> _Trace:
    """Run forward, loss and backward pass on a copy: under fake tensors if there is a mode, else on dummies."""
    parts = (model, inputs.positional, inputs.keywords, inputs.target, loss_fn)
    meant = resolve_meta_device(parts)
    substitute = partial(make_dummy, meant) if mode is None else partial(_fake, mode, meant)
    net, positional, keywords, target, loss = copy_parts(parts, substitute)
    tensors = [leaf for leaf in tree_leaves((positional, keywords, target)) if isinstance(leaf, Tensor)]
    recorder = Tracer(net, tensors, mode)
    with (
        preserve_rng_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        nullcontext() if mode is None else mode,
        recorder.watching(),
    ):
        outputs = net(*positional, **keywords)
        recorder.returned(outputs)
        if loss is not None:
            recorder.phase = "loss"
            outputs = loss(outputs, target)
        recorder.phase = "backward"
        ends = list_gradient_roots(outputs)
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        recorder.mark_gradients()
    paths = _paths(recorder.experts)
    questions = [question for question in recorder.questions if question[1] not in paths]
    return _Trace(recorder.operators(), recorder.experts, None if mode is None else questions)


def _best_level(seen: _Trace, blocks: Iterable[tuple[str, ...]], reasons: list[str]) -> Level:
    """Return the best level that what was seen allows, and add to the reasons against better ones."""
    if seen.questions is None:
        return "hooks"
    if not seen.questions:
        return "graph"
    reasons.append(f"graph: {_describe_question(*seen.questions[0])}")
    members = {path for group in blocks for path in group}
    if not members:
        reasons.append(f"modules: {tr('no block is repeated')}")
        return "hooks"
    within = [question for question in seen.questions if is_inside(question[1], members)]
    if not within:
        return "modules"
    reasons.append(f"modules: {_describe_question(*within[0])}")
    return "hooks"


def _describe_question(operator: str, module: str) -> str:
    return tr(
        "{operator} in {module} asks for values, which are known only when it runs",
        operator=operator,
        module=module or tr("the model"),
    )


def _operators_at_level(
    level: Level, seen: _Trace, blocks: Iterable[tuple[str, ...]], kinds: dict[str, str]
) -> tuple[Operator, ...]:
    experts = _paths(seen.experts)
    if level == "graph" and not experts:
        return seen.operators
    members = {path for group in blocks for path in group} if level == "modules" else set()

    def stays(operator: Operator) -> bool:
        return operator.module not in experts and (level == "graph" or is_inside(operator.module, members))

    return tuple(count_chosen_tokens(merge_operators(seen.operators, kinds, stays), seen.experts))


def _paths(experts: ExpertCalls) -> Collection[str]:
    return {path for path, _ in experts}


def _tied(model: nn.Module) -> tuple[tuple[str, str], ...]:
    first = {id(param): name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return tuple((name, first[id(param)]) for name, param in every if first[id(param)] != name)


def _shape(name: str, tensor: Tensor, *, trainable: bool | None = None) -> ParamShape:
    return ParamShape(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.element_size(),
        trainable=tensor.requires_grad if trainable is None else trainable,
    )


def _fake(mode: FakeTensorMode, meant: torch.device, tensor: Tensor) -> Tensor:
    if tensor.is_meta and meant.type != "meta":
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meant)
    else:  # without history and gradients: those that there are would be added to
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _mute_fake_tensor_log() -> Iterator[None]:
    """Keep torch from logging what fake tensors cannot do as an error: it is reported as a reason."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].removesuffix('.')}" if lines else type(error).__name__
