"""The wide & deep example's data: nothing in it is known only after departure."""

from __future__ import annotations

import datetime

import numpy as np
import torch

from examples.wide_and_deep.flights import READ, codes, count, days_from_holiday, slot_ids
from examples.wide_and_deep.model import WideDeepModel
from phalanx import ps
from phalanx.data.ctr.slots import hash_texts


def test_only_the_label_is_known_after_departure() -> None:
    known_after = {"dep_time", "dep_delay", "arr_time", "air_time", "time_hour"}
    assert not known_after & set(READ)
    assert [name for name in READ if "arr_delay" in name] == ["arr_delay"]


def test_crossed_columns_become_the_ids_of_their_texts() -> None:
    carrier, hour = codes(np.array(["UA", "B6", "UA"])), codes(np.array([7, 7, 8]))
    assert (
        slot_ids([carrier, hour], ("carrier", "hour")).tolist()
        == hash_texts("carrier x hour", ["UA|7", "B6|7", "UA|8"]).tolist()
    )
    assert slot_ids([carrier], ("carrier",)).tolist() == hash_texts("carrier", ["UA", "B6", "UA"]).tolist()


def test_traffic_counts_rows_alike() -> None:
    assert count([codes(np.array(["a", "b", "a"])), codes(np.array([1, 1, 1]))]).tolist() == [2, 1, 2]


def test_days_to_a_holiday_have_a_sign_and_an_end() -> None:
    days = [(7, 3), (7, 4), (7, 6), (8, 1), (12, 31)]
    assert [days_from_holiday(datetime.date(2013, *day)) for day in days] == [-1, 0, 2, 5, -1]


def test_the_model_is_linear_in_wide_ids_before_training() -> None:
    model = WideDeepModel(slots=3, dense=2, dim=4, hidden=(8,), rule=ps.Adagrad(0.1))
    dense, ids = torch.randn(5, 2), torch.randint(2**62, (5, 3))
    model(dense, ids).sum().backward()
    assert model(dense, ids).shape == (5,)
    assert all(p.grad is not None for p in model.parameters())
