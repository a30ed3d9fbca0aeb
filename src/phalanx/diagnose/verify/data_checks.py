"""`check_data`: whether two runs read the same rows at a step, and in which way they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.diagnose.verify.records import Step
from phalanx.diagnose.verify.verdict import DifferenceCause, FirstDifference


def check_data(first: Sequence[Step], second: Sequence[Step], number: int) -> FirstDifference | None:
    """Return a difference if the rows of this step are not the same, in any order and on any rank."""
    reference, candidate = rows_of(first[number]), rows_of(second[number])
    if not reference or not candidate or Counter(reference) == Counter(candidate):
        return None
    ids = [_samples(step) for step in (first[number], second[number])]
    shown = f" First samples: {_first_ids(ids[0])} against {_first_ids(ids[1])}." if all(ids) else ""
    if len(reference) != len(candidate) and number == 0:
        return _of_data(
            number,
            DifferenceCause.GLOBAL_BATCH,
            f"The global batch has {len(reference)} rows in the one run and {len(candidate)} in the other: the "
            "script's batch is per rank. Give px.distribute global_batch=, or divide the batch by the world size."
            + shown,
            1 - min(len(reference), len(candidate)) / max(len(reference), len(candidate)),
        )
    all_one, all_other = (Counter(row for step in run for row in rows_of(step)) for run in (first, second))
    common = sum((all_one & all_other).values()) / max(sum(all_one.values()), 1)
    missing = sum((Counter(reference) - Counter(candidate)).values()) / len(reference)
    if len(reference) != len(candidate):
        return _of_data(
            number,
            DifferenceCause.OTHER_DATA,
            f"The step has {len(reference)} rows in the one run and {len(candidate)} in the other: samples are "
            "repeated or left out where the number of ranks does not divide them (DistributedSampler repeats)." + shown,
            missing or 1.0,
        )
    if all(ids) and Counter(ids[0]) == Counter(ids[1]):
        return _of_data(
            number,
            DifferenceCause.OTHER_DATA,
            "The samples are the same and what came into the model is not: augmentation draws other numbers on another "
            "number of ranks. Seed it by sample (px.data pipelines and ShardedLoader do), or turn it off here.",
            missing,
        )
    if common > 0.5 or (all(ids) and _overlap(first, second) > 0.5):
        return _of_data(
            number,
            DifferenceCause.DATA_ORDER,
            "The runs read the same rows in another order. Shuffle by a seed that does not depend on the rank, call "
            "sampler.set_epoch(epoch), or give the data to px.distribute." + shown,
            missing,
        )
    return _of_data(number, DifferenceCause.OTHER_DATA, "The runs read other rows." + shown, missing)


def _overlap(first: Sequence[Step], second: Sequence[Step]) -> float:
    reference, candidate = (Counter(i for step in run for i in _samples(step)) for run in (first, second))
    return sum((reference & candidate).values()) / max(sum(reference.values()), 1)


def _of_data(number: int, cause: DifferenceCause, explanation: str, amount: float) -> FirstDifference:
    return FirstDifference(step=number, kind="samples", tensor="", amount=amount, cause=cause, explanation=explanation)


def rows_of(step: Step) -> list[int]:
    """Return the checksums of the rows of all ranks; empty where they are not known."""
    if step[0].meta["is_split"]:  # a pipeline calls its stages, not the model
        return []
    return [row for rank in step for row in rank.digests]


def _samples(step: Step) -> list[int]:
    return [] if any(rank.samples is None for rank in step) else [i for rank in step for i in rank.samples or ()]


def _first_ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")
