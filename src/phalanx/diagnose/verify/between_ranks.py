"""Checks between the ranks of one run: weights, data and gradients that copies of a model must have in common."""

from __future__ import annotations

from collections import Counter

import numpy as np

from phalanx.diagnose.verify.records import RankStep, Step, in_forward_order, sharded_names
from phalanx.diagnose.verify.tolerance import linear, relative
from phalanx.diagnose.verify.verdict import DifferenceCause, FirstDifference
from phalanx.parallel.observe.sketch import SQUARES, Sketch, distance, norm, single_difference

_NEAR = 1e-4
"""Relative distance within which a gradient is taken for one that was computed from recorded ones."""


def check_initial(step: Step, number: int) -> FirstDifference | None:
    """Return the first initial weight that differs between ranks."""
    name, ranks = _differing(step, "initial")
    if not name:
        return None
    return FirstDifference(
        step=number,
        kind="initial weight",
        tensor=name,
        amount=_apart(step, "initial", name),
        cause=DifferenceCause.SEED,
        ranks=ranks,
        explanation=(
            "Ranks begin with other weights. Set the same seed on all ranks before the model is made, or broadcast "
            "rank 0's weights, as px.distribute and DDP do."
        ),
    )


def check_shards(step: Step, number: int) -> FirstDifference | None:
    """Return a difference if two ranks read the same rows."""
    rows = [rank.digests for rank in step if rank.digests]
    if len(rows) < 2 or len(set(rows)) == len(rows) or step[0].meta["is_split"]:
        return None
    twice = tuple(rank.meta["rank"] for rank in step if rows.count(rank.digests) > 1)
    return FirstDifference(
        step=number,
        kind="samples",
        tensor="",
        amount=1.0,
        cause=DifferenceCause.NOT_SHARDED,
        ranks=twice,
        explanation=(
            "These ranks train on the same rows: the loader is not split over them. Give it to px.distribute, or the "
            "DataLoader a DistributedSampler."
        ),
    )


def check_trainable(step: Step, number: int) -> FirstDifference | None:
    """Return the first parameter that is frozen on some ranks and trained on others."""
    counts = Counter(name for rank in step for name in rank.meta["frozen"])
    names = in_forward_order([name for name, count in counts.items() if count < len(step)], step)
    if not names:
        return None
    ranks = tuple(rank.meta["rank"] for rank in step if names[0] in rank.meta["frozen"])
    return FirstDifference(
        step=number,
        kind="gradient",
        tensor=names[0],
        amount=1.0,
        cause=DifferenceCause.FROZEN,
        ranks=ranks,
        explanation=(
            "Its requires_grad is False on these ranks alone, so what they send is missing from the mean. Set it alike "
            "on all ranks, before the model is distributed."
        ),
    )


def check_gradients(step: Step, number: int) -> FirstDifference | None:
    """Return the first gradient that differs between ranks after the reduction."""
    name, odd = _differing(step, "grads")
    if not name:
        return None
    amount, differing = _apart(step, "grads", name), _differing_names(step, "grads")
    cause, ranks, why = _explain(step, name, odd, differing)
    return FirstDifference(
        step=number, kind="gradient", tensor=name, amount=amount, cause=cause, ranks=ranks, explanation=why
    )


def _explain(
    step: Step, name: str, odd: tuple[int, ...], differing: list[str]
) -> tuple[DifferenceCause, tuple[int, ...], str]:
    users = [rank.meta["rank"] for rank in step if name in rank.meta["local"]]
    extent = f"{len(differing)} of {len(step[0].meta['grads'])} gradients differ between ranks"
    if 0 < len(users) < len(step):
        others = tuple(rank.meta["rank"] for rank in step if rank.meta["rank"] not in users)
        why = (
            "These ranks did not use it in this step, and the others' gradient did not come to them. Reduce the "
            "gradients of all parameters on every rank (px.distribute does; DDP with find_unused_parameters=True)."
        )
        return DifferenceCause.PARTLY_USED, others, why
    if all(_is_own(rank, name) for rank in step):
        if any(rank.meta["was_accumulating"] for rank in step):
            why = (
                "DDP's no_sync() was on in the last backward pass before this step, so each rank has its own gradient; "
                f"{extent}. Leave the block before the last backward pass of an update."
            )
            return DifferenceCause.NO_SYNC, (), why
        why = f"Each rank has the gradient of its own rows; {extent}. Reduce it over all ranks before the step."
        return DifferenceCause.MISSING_ALL_REDUCE, (), why
    culprits = _culprits(step, name) or odd
    why = (
        f"{_entry(step, name, culprits)}{extent}, and the other ranks have the mean of what all computed. The value "
        "changed after the reduction: look for code that writes to .grad on this rank, and for memory or network "
        "errors."
    )
    return DifferenceCause.CORRUPT_GRADIENT, culprits, why


def _is_own(rank: RankStep, name: str) -> bool:
    local, reduced = rank.sketches("local").get(name), rank.sketches("grads").get(name)
    if local is None or reduced is None:
        return False
    return relative(local, reduced, 1e-30) < _NEAR


def _culprits(step: Step, name: str) -> tuple[int, ...]:
    """Return the ranks whose gradient is not the mean of what all ranks computed, if others' is."""
    parts = [rank.sketches("local").get(name) for rank in step]
    present = [part for part in parts if part is not None]
    if len(present) < len(step):
        return ()
    mean: Sketch = np.mean([linear(part) for part in present], axis=0)
    scale = float(np.linalg.norm(mean)) or 1e-30
    gaps = {
        rank.meta["rank"]: float(np.linalg.norm(linear(rank.sketches("grads")[name]) - mean)) / scale for rank in step
    }
    least = min(gaps.values())
    return tuple(rank for rank, gap in gaps.items() if gap > 2 * least + 1e-12) if least < _NEAR else ()


def _entry(step: Step, name: str, culprits: tuple[int, ...]) -> str:
    """Return which entry of a tensor differs, if it is a single one, as a sentence."""
    right = next((rank for rank in step if rank.meta["rank"] not in culprits), None)
    wrong = next((rank for rank in step if rank.meta["rank"] in culprits), None)
    if right is None or wrong is None:
        return ""
    size = int(np.prod(right.facts("grads")[name]["shape"]))
    single = single_difference(wrong.sketches("grads")[name], right.sketches("grads")[name], size)
    if single is None:
        return ""
    index, amount = single
    position = np.unravel_index(index, right.facts("grads")[name]["shape"] or (1,))
    return f"Entry {tuple(int(i) for i in position)} alone differs, by {amount:+.3e}. "


def check_between_steps(before: Step, step: Step, number: int) -> FirstDifference | None:
    """Return the first parameter that changed on some rank after the step before and before this forward pass."""
    changed: dict[str, list[int]] = {}
    for last, rank in zip(before, step, strict=True):
        weights = last.facts("weights")
        for name, bits in rank.meta["before"].items():
            if name in weights and weights[name]["digest"] != bits:
                changed.setdefault(name, []).append(rank.meta["rank"])
    names = in_forward_order([name for name, ranks in changed.items() if len(ranks) < len(step)], step)
    if not names:
        return None
    return FirstDifference(
        step=number,
        kind="weight",
        tensor=names[0],
        amount=float("nan"),
        cause=DifferenceCause.UPDATE,
        ranks=tuple(changed[names[0]]),
        explanation=(
            "It changed on these ranks alone after the optimizer's last step and before this forward pass: look for "
            "code that writes to weights, and for memory errors."
        ),
    )


def check_weights(step: Step, number: int) -> FirstDifference | None:
    """Return the first weight or buffer that differs between ranks after the update."""
    facts = step[0].facts("weights")
    names = _differing_names(step, "weights")
    params = [name for name in names if not facts.get(name, {}).get("is_buffer")]
    name = next(iter(params or names), "")
    if not name:
        return None
    _, odd = _differing(step, "weights", name)
    kind = facts.get(name, {}).get("kind", "")
    setting = differing_setting(step[0], *step[1:])
    if not params:
        cause = DifferenceCause.BATCH_NORM if "BatchNorm" in kind else DifferenceCause.UPDATE
        why = (
            "Each rank keeps running statistics of its own rows. Use SyncBatchNorm (strategy.sync_batch_norm), or "
            "average the buffers (px.distribute does)."
            if cause is DifferenceCause.BATCH_NORM
            else "Ranks keep other values in this buffer: compute it from what all ranks have in common."
        )
    elif setting:
        cause, why = DifferenceCause.SETTINGS, f"The ranks' optimizers have other settings: {setting}. Set them alike."
    else:
        cause = DifferenceCause.UPDATE
        why = (
            "Gradients and settings are the same on all ranks, and the weights after the step are not: look for code "
            "that writes to weights or to the optimizer's state on some ranks, and for memory errors."
        )
    return FirstDifference(
        step=number,
        kind="weight" if params else "buffer",
        tensor=name,
        amount=_apart(step, "weights", name),
        cause=cause,
        ranks=odd,
        explanation=why,
    )


def differing_setting(first: RankStep, *others: RankStep) -> str:
    """Return an optimizer setting that differs, with its values, as text; empty if none does."""
    for other in others:
        for mine, theirs in zip(first.meta["settings"], other.meta["settings"], strict=False):
            for key in mine:
                if mine[key] != theirs.get(key):
                    return f"{key} is {mine[key]} on rank {first.meta['rank']} and {theirs.get(key)} on rank " + str(
                        other.meta["rank"]
                    )
    return ""


def _differing_names(step: Step, what: str) -> list[str]:
    facts = [rank.facts(what) for rank in step]
    names = dict.fromkeys(name for of_rank in facts for name in of_rank)
    sharded, is_split = sharded_names(step), step[0].meta["is_split"]
    differing = []
    for name in names:
        copies = {_identity(of_rank.get(name)) for of_rank in facts if name in of_rank or not is_split}
        if len(copies) > 1 and name not in sharded:
            differing.append(name)
    return in_forward_order(differing, step)


def _identity(facts: dict[str, object] | None) -> object:
    return None if facts is None else (facts["digest"], tuple(facts["shape"]))  # type: ignore[arg-type]


def _differing(step: Step, what: str, name: str = "") -> tuple[str, tuple[int, ...]]:
    """Return the first tensor that differs, and the ranks in the minority if there is one."""
    name = name or next(iter(_differing_names(step, what)), "")
    if not name:
        return "", ()
    holders: dict[object, list[int]] = {}
    for rank in step:
        holders.setdefault(_identity(rank.facts(what).get(name)), []).append(rank.meta["rank"])
    most = max(holders.values(), key=len)
    if len(most) * 2 <= len(step):
        return name, ()
    return name, tuple(rank for ranks in holders.values() if ranks is not most for rank in ranks)


def _apart(step: Step, what: str, name: str) -> float:
    """Return the largest relative distance between two ranks' copies."""
    copies = [rank.sketches(what).get(name) for rank in step]
    present = [copy for copy in copies if copy is not None]
    if len(present) < len(copies):
        return 1.0
    if any(copy[-1] for copy in present):
        return float("inf")
    scale = max(float(np.sqrt(copy[SQUARES])) for copy in present) or 1.0
    return max(distance(present[0], other) for other in present[1:]) / scale if norm(present[0]) else 1.0
