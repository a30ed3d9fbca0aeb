"""The update rules in NumPy, on gathered rows: what the native rules are tested against.

Every operation is a float32 one, in the order that `csrc/table_rules.h` has too; factors are made in float64 first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.table.rules import FTRL, SGD, Adagrad, Adam, Momentum, RMSprop, RowWiseAdagrad, Rule

Array = NDArray[np.float32]
f32 = np.float32


def initial_state(rule: Rule, state: Array) -> None:
    """Fill the optimizer state, shape (n, state), of new rows."""
    state[:] = 0
    if isinstance(rule, Adagrad):
        steps = state.shape[1] - 1 if rule.lr_decay else state.shape[1]
        state[:, :steps] = rule.initial_accumulator_value
    elif isinstance(rule, RowWiseAdagrad):
        state[:] = rule.initial_accumulator_value


def update(rule: Rule, values: Array, state: Array, gradients: Array, lr: float) -> None:
    """Apply one gradient per row, changing `values` and `state`.

    Args:
        rule: Which rule; its learning rate is not read.
        values: Shape (n, dim).
        state: Shape (n, state), as `Layout` says.
        gradients: Shape (n, dim); not changed.
        lr: Learning rate.
    """
    _UPDATES[type(rule)](rule, values, state, gradients, lr)


def _decayed(gradients: Array, values: Array, weight_decay: float) -> Array:
    return gradients + f32(weight_decay) * values if weight_decay else gradients


def _sgd(rule: SGD, values: Array, _: Array, gradients: Array, lr: float) -> None:
    values -= f32(lr) * _decayed(gradients, values, rule.weight_decay)


def _momentum(rule: Momentum, values: Array, state: Array, gradients: Array, lr: float) -> None:
    dim = values.shape[1]
    gradient = _decayed(gradients, values, rule.weight_decay)
    velocity = f32(rule.momentum) * state[:, :dim] + f32(1 - rule.dampening) * gradient
    if rule.dampening:  # the first gradient of a row is taken undampened
        velocity = np.where(state[:, dim:] == 0, gradient, velocity)
        state[:, dim] += f32(1)
    state[:, :dim] = velocity
    values -= f32(lr) * (gradient + f32(rule.momentum) * velocity if rule.nesterov else velocity)


def _adagrad(rule: Adagrad, values: Array, state: Array, gradients: Array, lr: float) -> None:
    dim = values.shape[1]
    gradient = _decayed(gradients, values, rule.weight_decay)
    rate: Array | np.float32 = f32(lr)
    if rule.lr_decay:
        rate = (lr / (1 + state[:, dim:].astype(np.float64) * rule.lr_decay)).astype(f32)
        state[:, dim] += f32(1)
    state[:, :dim] += gradient * gradient
    values -= rate * (gradient / (np.sqrt(state[:, :dim]) + f32(rule.eps)))


def _row_wise_adagrad(rule: RowWiseAdagrad, values: Array, state: Array, gradients: Array, lr: float) -> None:
    wide = gradients.astype(np.float64)
    state[:, 0] += (wide * wide).mean(axis=1).astype(f32)
    values -= (f32(lr) / (np.sqrt(state[:, :1]) + f32(rule.eps))) * gradients


def _adam(rule: Adam, values: Array, state: Array, gradients: Array, lr: float) -> None:
    dim = values.shape[1]
    mean, square = state[:, :dim], state[:, dim : 2 * dim]
    first, second = rule.betas
    state[:, -1] += f32(1)
    steps = state[:, -1:].astype(np.float64)
    if rule.decoupled:
        values *= f32(1 - lr * rule.weight_decay)
        gradient = gradients
    else:
        gradient = _decayed(gradients, values, rule.weight_decay)
    mean += f32(1 - first) * (gradient - mean)
    square[:] = f32(second) * square + f32(1 - second) * (gradient * gradient)
    rate = (lr / (1 - first**steps)).astype(f32)
    correction = np.sqrt(1 - second**steps).astype(f32)
    values -= rate * (mean / (np.sqrt(square) / correction + f32(rule.eps)))


def _rmsprop(rule: RMSprop, values: Array, state: Array, gradients: Array, lr: float) -> None:
    gradient = _decayed(gradients, values, rule.weight_decay)
    state[:] = f32(rule.alpha) * state + f32(1 - rule.alpha) * (gradient * gradient)
    values -= f32(lr) * (gradient / (np.sqrt(state) + f32(rule.eps)))


def _ftrl(rule: FTRL, values: Array, state: Array, gradients: Array, lr: float) -> None:
    dim = values.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    alpha = f32(lr)
    grown = n + gradients * gradients
    z += gradients - ((np.sqrt(grown) - np.sqrt(n)) / alpha) * values
    n[:] = grown
    strength = (f32(rule.beta) + np.sqrt(n)) / alpha + f32(rule.l2)
    # With beta, l2 and n all 0 the strength is 0, and so is z: such an element has no gradient yet and is 0.
    pulled = np.divide(np.sign(z) * f32(rule.l1) - z, strength, out=np.zeros_like(z), where=strength > 0)
    values[:] = np.where(np.abs(z) <= f32(rule.l1), f32(0), pulled)


_UPDATES: dict[type[Rule], Callable[..., None]] = {
    SGD: _sgd,
    Momentum: _momentum,
    Adagrad: _adagrad,
    RowWiseAdagrad: _row_wise_adagrad,
    Adam: _adam,
    RMSprop: _rmsprop,
    FTRL: _ftrl,
}
