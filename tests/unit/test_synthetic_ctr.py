"""Made-up clicks: any worker makes any range, in the shape of the real logs, with a known best AUC."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.data import ShardedLoader
from phalanx.data.ctr.synthetic import DRIFT, TOP_SHARE, SyntheticClicks
from phalanx.errors import ConfigError


@example(start=0, cut=20, day=2**37)
@settings(max_examples=20)
@given(start=st.integers(0, 2**40), cut=st.integers(0, 20), day=st.none() | st.integers(2**37, 2**38))
def test_a_row_does_not_depend_on_the_range_it_is_made_in(start: int, cut: int, day: int | None) -> None:
    clicks = SyntheticClicks(2**41, rows_per_day=day)
    whole, part = clicks.make(start, 20), clicks.make(start + cut, 20 - cut)
    for name in ("label", "dense", "ids"):
        assert getattr(whole, name)[cut:].tolist() == getattr(part, name).tolist()


def test_a_hundredth_of_the_ids_takes_most_accesses() -> None:
    clicks = SyntheticClicks(10**6)
    _, counts = np.unique(clicks.make(0, 60_000).ids[:, 19], return_counts=True)
    top = int(clicks.cardinalities[19]) // 100
    assert np.sort(counts)[-top:].sum() / 60_000 == pytest.approx(TOP_SHARE, abs=0.01)


def test_the_best_auc_is_that_of_the_true_probabilities() -> None:
    from sklearn.metrics import roc_auc_score

    from phalanx.data.ctr.synthetic import _probability

    clicks = SyntheticClicks(10**6)
    _, ids, normal = clicks._draw(0, 40_000)
    label = clicks.make(0, 40_000).label
    assert 0.1 < label.mean() < 0.4
    true = roc_auc_score(label, _probability(clicks._teacher(ids), normal))
    assert clicks.bayes_auc(40_000) == pytest.approx(true, abs=0.01)
    assert 0.75 < true < 0.9


def test_each_day_renames_some_ids() -> None:
    still, drifting = SyntheticClicks(10**6).make(0, 9000), SyntheticClicks(10**6, rows_per_day=3000).make(0, 9000)
    shares = []
    for day in range(3):
        of_day = slice(3000 * day, 3000 * (day + 1))
        _, first = np.unique(still.ids[of_day], return_index=True)
        shares.append((still.ids[of_day] != drifting.ids[of_day]).reshape(-1)[first].mean())
    assert shares == pytest.approx([0, DRIFT, 2 * DRIFT], abs=0.02)
    assert shares[0] == 0


def test_a_loader_reads_them_as_batches() -> None:
    loader = ShardedLoader(SyntheticClicks(100), batch_size=32)
    assert [tuple(part.shape) for part in next(iter(loader))] == [(32, 13), (32, 26), (32,)]
    assert sum(len(label) for _, _, label in loader) == 100
    assert sum(len(label) for _, _, label in SyntheticClicks(100, batch_size=8)) == 100


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 rows at scale 0.001"):
        SyntheticClicks(0)
    with pytest.raises(ConfigError, match=r"1 rows at scale 2"):
        SyntheticClicks(1, scale=2)
    with pytest.raises(ConfigError, match="Give batch_size="):
        next(iter(SyntheticClicks(1)))
