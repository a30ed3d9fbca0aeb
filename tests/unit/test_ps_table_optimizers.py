"""Every rule against torch.optim on the same rows; FTRL against its paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

import phalanx.ps
from phalanx.ps.table.rules import TableSpec, Uniform
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import (
    FTRL,
    RULES,
    SGD,
    Adagrad,
    Adam,
    Momentum,
    RMSprop,
    RowWiseAdagrad,
    Rule,
    UpdateRule,
)
from phalanx.versions import HAS_NATIVE
from ps_tables import TABLES, pulled

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
STEPS, ROWS, DIM = 8, 5, 6

CASES: list[tuple[Rule, Optimizer]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (SGD(0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    (Momentum(0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (
        Momentum(0.1, momentum=0.8, dampening=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.5, weight_decay=0.1),
    ),
    (
        Momentum(0.1, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    (
        Adagrad(0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
    ),
    (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    (
        Adam(0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    (Adam(0.01, weight_decay=0.1, decoupled=True), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    (RMSprop(0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
    (
        RMSprop(0.01, alpha=0.9, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=1e-6, weight_decay=0.1),
    ),
]

WITHOUT_TORCH_TWIN = {RowWiseAdagrad, FTRL}
"""Rules that have a test of their own below."""

KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 12345], np.int64)


def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize("rule_class", RULES)
def test_every_rule_is_public_tested_and_native(rule_class: type[UpdateRule]) -> None:
    assert getattr(phalanx.ps, rule_class.__name__) is rule_class, "name it in phalanx/ps/__init__.py"
    assert rule_class in WITHOUT_TORCH_TWIN | {type(rule) for rule, _ in CASES}, "add a row to CASES"
    rule: Rule = rule_class(lr=0.1)  # type: ignore[assignment,call-arg]
    rows = []
    for make in (param.values[0] for param in TABLES if not param.marks or HAS_NATIVE):
        table = make(
            TableSpec("t", DIM, rule, Uniform(0.5))
        )  # raises where csrc/table_rules.h has no struct of the kind
        for step in range(STEPS):
            table.push(KEYS, gradients(step))
        rows.append(pulled(table, KEYS))
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_of", TABLES)
@pytest.mark.parametrize(("rule", "optimizer"), CASES, ids=lambda value: getattr(value, "kind", ""))
def test_rows_follow_torch(table_of: Callable[[TableSpec], RowTable], rule: Rule, optimizer: Optimizer) -> None:
    table = table_of(TableSpec("t", DIM, rule, Uniform(0.5)))
    weight = torch.tensor(pulled(table, KEYS), requires_grad=True)
    stepper = optimizer([weight])
    for step in range(STEPS):
        weight.grad = torch.tensor(gradients(step))
        if step == STEPS // 2:  # a schedule changes the rate, and the push brings the new one
            stepper.param_groups[0]["lr"] /= 2
        stepper.step()
        table.push(KEYS, gradients(step), stepper.param_groups[0]["lr"] if step >= STEPS // 2 else None)
        np.testing.assert_allclose(pulled(table, KEYS), weight.detach().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_of", TABLES)
def test_row_wise_adagrad_sums_the_mean_square_of_the_row(table_of: Callable[[TableSpec], RowTable]) -> None:
    rule = RowWiseAdagrad(0.1, initial_accumulator_value=0.2, eps=1e-6)
    table = table_of(TableSpec("t", DIM, rule, Uniform(0.5)))
    weight = pulled(table, KEYS).astype(np.float64)
    accumulated = np.full((ROWS, 1), 0.2)
    for step in range(STEPS):
        gradient = gradients(step).astype(np.float64)
        accumulated += (gradient**2).mean(axis=1, keepdims=True)
        weight -= 0.1 * gradient / (np.sqrt(accumulated) + 1e-6)
        table.push(KEYS, gradients(step))
    np.testing.assert_allclose(pulled(table, KEYS), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_of", TABLES)
@pytest.mark.parametrize(("beta", "l1", "l2"), [(1.0, 0.0, 0.0), (0.5, 0.3, 0.0), (1.0, 0.2, 0.4)])
def test_ftrl_follows_algorithm_1_of_its_paper(
    table_of: Callable[[TableSpec], RowTable], beta: float, l1: float, l2: float
) -> None:
    alpha = 0.1
    table = table_of(TableSpec("t", DIM, FTRL(alpha, beta, l1, l2), Uniform(0.5)))
    weight = pulled(table, KEYS).astype(np.float64)
    assert weight.any(), "a row without a gradient reads as its initial value"
    z, n = np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM))
    for step in range(STEPS):
        gradient = gradients(step).astype(np.float64)
        sigma = (np.sqrt(n + gradient**2) - np.sqrt(n)) / alpha
        z += gradient - sigma * weight
        n += gradient**2
        weight = np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
        table.push(KEYS, gradients(step))
        np.testing.assert_allclose(pulled(table, KEYS), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_of", TABLES)
def test_adam_counts_the_updates_of_each_row(table_of: Callable[[TableSpec], RowTable]) -> None:
    table = table_of(TableSpec("t", DIM, Adam(0.01), Uniform(0.5)))
    rows = [torch.tensor(row, requires_grad=True) for row in pulled(table, KEYS)]
    steppers = [torch.optim.Adam([row], 0.01) for row in rows]
    for step in range(STEPS):
        chosen = np.flatnonzero(np.random.default_rng(100 + step).random(ROWS) < 0.5)
        table.push(KEYS[chosen], gradients(step)[chosen])
        for row in chosen:
            rows[row].grad = torch.tensor(gradients(step)[row])
            steppers[row].step()
    expected = torch.stack(rows).detach().numpy()
    np.testing.assert_allclose(pulled(table, KEYS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_of", TABLES)
def test_small_steps_are_not_lost_in_bfloat16(table_of: Callable[[TableSpec], RowTable]) -> None:
    table = table_of(TableSpec("t", 64, SGD(1e-4), Uniform(0), dtype="bfloat16"))
    keys = np.array([1], np.int64)
    table.assign(keys, np.ones((1, 64), np.float32))
    for _ in range(1000):  # each step is an eightieth of what bfloat16 tells apart next to 1
        table.push(keys, np.full((1, 64), 0.5, np.float32))
    assert pulled(table, keys).mean() == pytest.approx(0.95, abs=0.003)
