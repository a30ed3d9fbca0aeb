"""Checks between two runs at one step, in the order of the step: outputs, loss, gradients, weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.diagnose.verify.between_ranks import differing_setting
from phalanx.diagnose.verify.data_checks import rows_of
from phalanx.diagnose.verify.records import (
    RankStep,
    Step,
    in_forward_order,
    merge_ranks,
    readers_of,
    sharded_names,
)
from phalanx.diagnose.verify.tolerance import OutputLevels, Tolerance, floor, linear, relative, row_difference
from phalanx.diagnose.verify.verdict import DifferenceCause, FirstDifference
from phalanx.parallel.observe.recorder import DRAWS
from phalanx.parallel.observe.sketch import NOT_FINITE, Sketch

_NEAR = 1e-4


def check_initial(first: Step, second: Step, number: int) -> FirstDifference | None:
    """Return the first initial weight that the runs do not have in common."""
    before, after = merge_ranks(first, "initial"), merge_ranks(second, "initial")
    for name in in_forward_order(list(before.facts("initial")), first):
        reference, candidate = before.sketches("initial")[name], after.sketches("initial").get(name)
        if candidate is None or before.facts("initial")[name]["shape"] != after.facts("initial")[name]["shape"]:
            continue  # a Plan shards it
        apart = relative(reference, candidate, 1e-30)
        if apart > 1e-5:
            return FirstDifference(
                step=number,
                kind="initial weight",
                tensor=name,
                amount=apart,
                cause=DifferenceCause.SEED,
                explanation=(
                    "The runs begin with other weights. Let the script set its seed (torch.manual_seed) before it "
                    "makes the model, to a number that does not depend on the rank."
                ),
            )
    return None


def check_outputs(first: Step, second: Step, number: int, tolerance: Tolerance) -> FirstDifference | None:
    """Return the first module, in forward order, whose output differs for the same rows."""
    reference, candidate = _by_row(first), _by_row(second)
    if reference is None or candidate is None:
        return None
    levels, outputs = OutputLevels(first[0]), _join_ranks(second, candidate)
    for name, rows in _join_ranks(first, reference).items():
        least, theirs = levels.least(name, rows), outputs.get(name)
        is_whole = first[0].row_sizes.get(name) == second[0].row_sizes.get(name)
        if theirs is None or theirs.shape != rows.shape or not is_whole:
            continue
        apart = row_difference(rows, theirs, least)
        if apart > tolerance.of_tensor("outputs", name):
            kind = first[0].kinds.get(name, "")
            cause, why = _explain_output(kind)
            if cause is DifferenceCause.FORWARD and (partly := _partly_used(second, number, apart)):
                return partly
            return FirstDifference(
                step=number, kind="output", tensor=name or kind, amount=apart, cause=cause, explanation=why
            )
    return None


def _partly_used(step: Step, number: int, amount: float) -> FirstDifference | None:
    """Return a difference if some ranks did not use a parameter that others used, for the same step."""
    used = [set(rank.meta["local"]) for rank in step]
    names = in_forward_order(sorted(set.union(*used) - set.intersection(*used)), step)
    if not names:
        return None
    return FirstDifference(
        step=number,
        kind="gradient",
        tensor=names[0],
        amount=amount,
        cause=DifferenceCause.PARTLY_USED,
        ranks=tuple(rank.meta["rank"] for rank in step if names[0] not in rank.meta["local"]),
        explanation=(
            "These ranks did not use it, and what the model computes of the same rows depends on that. Let all ranks "
            "take the same branch, or decide by the row."
        ),
    )


def _explain_output(kind: str) -> tuple[DifferenceCause, str]:
    name = kind.removesuffix(DRAWS)
    if "BatchNorm" in name and not name.startswith("SyncBatchNorm"):
        return DifferenceCause.BATCH_NORM, (
            f"This {name} normalises each rank's rows by their own statistics. Use strategy.sync_batch_norm or "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm."
        )
    if kind.endswith(DRAWS):
        return DifferenceCause.RANDOM, (
            f"This {name} draws random numbers (dropout), and other numbers of ranks draw others. Compare with "
            "--replicas N, which draws by sample share, or without dropout; else only the seed differs."
        )
    return DifferenceCause.FORWARD, (
        f"For the same rows and weights this {name} computes something else: it depends on the rank, on the number of "
        "rows or on the other rows of the batch."
    )


def check_loss(first: Step, second: Step, number: int, tolerance: Tolerance) -> FirstDifference | None:
    """Return a difference if no usual mean of the ranks' losses is that of the other run."""
    reference, candidate = _losses(first), _losses(second)
    if not reference or not candidate:
        return None
    target = reference[0]
    gaps = [abs(target - value) / max(abs(target), abs(value), 1e-300) for value in candidate]
    if np.isnan(target) or min(gaps) <= tolerance.of_tensor("loss", ""):
        return None
    return FirstDifference(
        step=number,
        kind="loss",
        tensor="",
        amount=min(gaps),
        cause=DifferenceCause.LOSS,
        explanation=(
            f"It is {target:.6g} in the one run and {candidate[0]:.6g} on average in the other, while the model's "
            "outputs agree: targets are matched to other rows, or the loss is weighted in another way."
        ),
    )


def _losses(step: Step) -> list[float]:
    """Return the mean by rows, the plain mean and the sum of the losses of all backward passes."""
    values = [value for rank in step for value in rank.meta["losses"]]
    rows = [count for rank in step for count in rank.meta["parts"]]
    if not values or step[0].meta["is_split"]:
        return []
    weighted = float(np.average(values, weights=rows)) if len(rows) == len(values) and sum(rows) else None
    plain = float(np.mean(values))
    return [plain if weighted is None else weighted, plain, float(np.sum(values))]


def check_gradients(first: Step, second: Step, number: int, tolerance: Tolerance) -> FirstDifference | None:
    """Return the first gradient, in forward order, that differs."""
    before, after = merge_ranks(first, "grads"), merge_ranks(second, "grads")
    reference, candidate = before.sketches("grads"), after.sketches("grads")
    sharded = sharded_names(first) | sharded_names(second)
    names = [name for name in dict.fromkeys([*reference, *candidate]) if name not in sharded]
    for name in in_forward_order(names, first):
        if name not in reference or name not in candidate:
            return _missing(name, number, in_second=name not in candidate)
        if before.facts("grads")[name]["shape"] != after.facts("grads")[name]["shape"]:
            continue
        apart = relative(reference[name], candidate[name], floor(reference, before, "grads", name))
        if apart > tolerance.of_tensor("grads", name):
            if candidate[name][NOT_FINITE] or reference[name][NOT_FINITE]:
                cause, why = (
                    DifferenceCause.NOT_FINITE,
                    "It holds NaN or infinity in one run alone; run with --check-nan-inf.",
                )
            else:
                cause, why = _explain_gradient(reference[name], candidate[name], readers_of(second), name)
            return FirstDifference(
                step=number, kind="gradient", tensor=name, amount=apart, cause=cause, explanation=why
            )
    return None


def _missing(name: str, number: int, *, in_second: bool) -> FirstDifference:
    where = "the other" if in_second else "the first"
    return FirstDifference(
        step=number,
        kind="gradient",
        tensor=name,
        amount=1.0,
        cause=DifferenceCause.PARTLY_USED,
        explanation=f"It has no gradient in {where} run: the parameter is frozen or not used there.",
    )


def _explain_gradient(before: Sketch, after: Sketch, second: Step, name: str) -> tuple[DifferenceCause, str]:
    """Return the likely cause of a gradient that differs, from what the ranks that read rows of their own computed."""
    reference, reduced = linear(before), linear(after)
    scale = float(np.linalg.norm(reference)) or 1e-300
    parts = [rank.sketches("local").get(name) for rank in second]
    local = [linear(part) for part in parts if part is not None]
    rows = [len(rank.digests) for rank in second]
    if len(local) == len(second) > 1 and all(rows):
        plain = np.mean(local, axis=0)
        weighted = np.average(local, axis=0, weights=rows)
        is_plain = float(np.linalg.norm(reduced - plain)) < _NEAR * scale
        if len(set(rows)) > 1 and is_plain and float(np.linalg.norm(reference - weighted)) < _NEAR * scale:
            return DifferenceCause.UNEVEN_BATCH, (
                f"Ranks have {' and '.join(map(str, rows))} rows, and their gradients were averaged as if they had as "
                "many each. Weight them by rows (px.distribute does), or drop the last batch."
            )
    factor = float(reduced @ reference) / scale**2
    if abs(factor - 1) > 1e-3 and float(np.linalg.norm(reduced - factor * reference)) < _NEAR * scale * abs(factor):
        ranks = len(second)
        how = (
            "gradients are summed over the ranks, not averaged"
            if abs(factor - ranks) < 1e-3
            else "gradients are divided by the number of ranks twice"
            if abs(factor - 1 / ranks) < 1e-3
            else "look for the scale of the loss, and for accumulation over another number of batches"
        )
        return DifferenceCause.GRADIENT_SCALE, f"It is {factor:.6g} times what it should be: {how}."
    if len(local) == len(second) > 1 and all(rows):
        for mean in (plain, weighted):
            if float(np.linalg.norm(reference - mean)) < _NEAR * scale:
                return DifferenceCause.REDUCTION, (
                    "The mean of what the ranks computed is right, and what the reduction made of it is not: look for "
                    "compression, hooks of the reduction, clipping before it, and ranks left out of the group."
                )
    return DifferenceCause.BACKWARD, (
        "Outputs and loss agree and the ranks' own gradients do not: look for what only the backward pass does "
        "(detach, hooks, losses with other weights, gradient checkpointing with random numbers)."
    )


def check_weights(first: Step, second: Step, number: int, tolerance: Tolerance) -> FirstDifference | None:
    """Return the first weight or buffer, in forward order, that differs after the update."""
    before, after = merge_ranks(first, "weights"), merge_ranks(second, "weights")
    reference, candidate = before.sketches("weights"), after.sketches("weights")
    facts, theirs = before.facts("weights"), after.facts("weights")
    names = in_forward_order([name for name in reference if name in candidate], first)
    for name in sorted(names, key=lambda name: bool(facts[name]["is_buffer"])):
        if facts[name]["shape"] != theirs[name]["shape"]:
            continue
        apart = relative(reference[name], candidate[name], floor(reference, before, "weights", name))
        if apart > tolerance.of_tensor("weights", name):
            cause, why = _explain_weight(first[0], second[0], facts[name])
            kind = "buffer" if facts[name]["is_buffer"] else "weight"
            return FirstDifference(step=number, kind=kind, tensor=name, amount=apart, cause=cause, explanation=why)
    return None


def _explain_weight(first: RankStep, second: RankStep, facts: dict[str, object]) -> tuple[DifferenceCause, str]:
    if setting := differing_setting(first, second).replace(f" on rank {first.meta['rank']} and", " in the one run and"):
        setting = setting.replace(f" on rank {second.meta['rank']}", " in the other")
        return DifferenceCause.SETTINGS, f"The runs' optimizers have other settings: {setting}."
    if facts["is_buffer"]:
        is_norm = "BatchNorm" in str(facts["kind"])
        return (DifferenceCause.BATCH_NORM if is_norm else DifferenceCause.UPDATE), (
            "The runs keep other values in this buffer, though outputs, gradients and weights agree: running "
            "statistics are those of one rank's rows. Average them (px.distribute does), or use SyncBatchNorm."
        )
    return DifferenceCause.UPDATE, (
        "Gradients agree before the step and the weights after it do not: look at clipping, weight decay, the order of "
        "parameter groups and code that writes to weights."
    )


def _by_row(step: Step) -> NDArray[np.int64] | None:
    """Return the order that sorts the rows of all ranks by what came in; None where rows are not known."""
    rows = rows_of(step)
    return np.argsort(np.array(rows), kind="stable") if rows else None


def _join_ranks(step: Step, order: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Return the outputs of all ranks, rows in the given order; of modules that every rank called for all its rows."""
    joined = {}
    for name in step[0].outputs:
        parts = [rank.outputs[name] for rank in step if name in rank.outputs]
        if len(parts) == len(step) and sum(map(len, parts)) == len(order):
            joined[name] = np.concatenate(parts)[order]
    return joined
