"""`UpdateRule`: optimizers of tables (SGD, Momentum, Adagrad, Adam, RMSprop, FTRL): settings, state, NumPy step.

A rule is one class here, one struct in `csrc/table_rules.h` that takes the same steps natively, and one row in
`tests/unit/test_ps_table_optimizers.py`; everything else is derived from `RULES`. Rules follow `torch.optim` on the
rows a step touches; FTRL follows H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013,
algorithm 1. Every operation on rows is a float32 one, in the order that the native rule has too; factors are made in
float64 first.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_frozen = ConfigDict(extra="forbid")
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Array = NDArray[np.float32]
f32 = np.float32


class UpdateRule:
    """What every rule has. Subclasses are frozen dataclasses with a `kind` and an `lr`."""

    divides_by_lr: ClassVar[bool] = False
    """Whether a learning rate of 0 makes no sense."""

    supports_deltas: ClassVar[bool] = True
    """Whether adding to the values of a row leaves its state valid, as geo mode does."""

    def state_columns(self, dim: int) -> int:
        """Return the columns of optimizer state of a row: `dim` for each kind that a value has, then those of a row."""
        raise NotImplementedError

    def initial_state(self, dim: int) -> Array:
        """Return the optimizer state of a new row, shape (state columns,)."""
        return np.zeros(self.state_columns(dim), f32)

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """Apply one gradient per row, changing `values` and `state`.

        Args:
            values: Shape (n, dim).
            state: Shape (n, state columns).
            gradients: Shape (n, dim); not changed.
            lr: Learning rate, in place of the rule's own.
        """
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """Return the settings as the native rule reads them; a pair has an entry for each part, as `betas.0`."""
        numbers: dict[str, float] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value: Any = getattr(self, field.name)
            if isinstance(value, tuple):
                numbers |= {f"{field.name}.{i}": float(part) for i, part in enumerate(value)}
            elif field.name != "kind":
                numbers[field.name] = float(value)
        return numbers


def _decay(gradients: Array, values: Array, weight_decay: float) -> Array:
    """Return gradients with L2 regularization."""
    return gradients + f32(weight_decay) * values if weight_decay else gradients


@dataclass(frozen=True, config=_frozen)
class SGD(UpdateRule):
    """`row -= lr * (gradient + weight_decay * row)`; no state."""

    lr: Rate
    weight_decay: Rate = 0.0
    kind: Literal["sgd"] = "sgd"

    def state_columns(self, dim: int) -> int:
        """Return 0."""
        return 0

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        values -= f32(lr) * _decay(gradients, values, self.weight_decay)


@dataclass(frozen=True, config=_frozen)
class Momentum(UpdateRule):
    """SGD with momentum, as `torch.optim.SGD`; one state value per element."""

    lr: Rate
    momentum: Fraction = 0.9
    dampening: Fraction = 0.0
    nesterov: bool = False
    weight_decay: Rate = 0.0
    kind: Literal["momentum"] = "momentum"

    def state_columns(self, dim: int) -> int:
        """Return velocity, and with dampening the number of the row's updates."""
        return dim + (self.dampening != 0)

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        dim = values.shape[1]
        gradient = _decay(gradients, values, self.weight_decay)
        velocity = f32(self.momentum) * state[:, :dim] + f32(1 - self.dampening) * gradient
        if self.dampening:  # the first gradient of a row is taken undampened
            velocity = np.where(state[:, dim:] == 0, gradient, velocity)
            state[:, dim] += f32(1)
        state[:, :dim] = velocity
        values -= f32(lr) * (gradient + f32(self.momentum) * velocity if self.nesterov else velocity)


@dataclass(frozen=True, config=_frozen)
class Adagrad(UpdateRule):
    """As `torch.optim.Adagrad`; one state value per element."""

    lr: Rate
    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Positive = 1e-10
    kind: Literal["adagrad"] = "adagrad"

    def state_columns(self, dim: int) -> int:
        """Return the accumulator, and with a decay of the rate the number of the row's updates."""
        return dim + (self.lr_decay != 0)

    def initial_state(self, dim: int) -> Array:
        """See `UpdateRule.initial_state`."""
        state = np.zeros(self.state_columns(dim), f32)
        state[:dim] = self.initial_accumulator_value
        return state

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        dim = values.shape[1]
        gradient = _decay(gradients, values, self.weight_decay)
        rate: Array | np.float32 = f32(lr)
        if self.lr_decay:
            rate = (lr / (1 + state[:, dim:].astype(np.float64) * self.lr_decay)).astype(f32)
            state[:, dim] += f32(1)
        state[:, :dim] += gradient * gradient
        values -= rate * (gradient / (np.sqrt(state[:, :dim]) + f32(self.eps)))


@dataclass(frozen=True, config=_frozen)
class RowWiseAdagrad(UpdateRule):
    """Adagrad whose accumulator is the mean of the squared gradient over the row: one state value per row."""

    lr: Rate
    initial_accumulator_value: Rate = 0.0
    eps: Positive = 1e-10
    kind: Literal["row_wise_adagrad"] = "row_wise_adagrad"

    def state_columns(self, dim: int) -> int:
        """Return 1: the accumulator."""
        return 1

    def initial_state(self, dim: int) -> Array:
        """See `UpdateRule.initial_state`."""
        return np.full(1, self.initial_accumulator_value, f32)

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        wide = gradients.astype(np.float64)
        state[:, 0] += (wide * wide).mean(axis=1).astype(f32)
        values -= (f32(lr) / (np.sqrt(state[:, :1]) + f32(self.eps))) * gradients


@dataclass(frozen=True, config=_frozen)
class Adam(UpdateRule):
    """As `torch.optim.Adam`, a row's step counting the updates of that row; two state values per element and one."""

    lr: Rate = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    decoupled: bool = False
    """Whether weight decay acts on the row instead of the gradient (`torch.optim.AdamW`)."""

    kind: Literal["adam"] = "adam"

    def state_columns(self, dim: int) -> int:
        """Return both moments and the number of the row's updates."""
        return 2 * dim + 1

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        dim = values.shape[1]
        mean, square = state[:, :dim], state[:, dim : 2 * dim]
        first, second = self.betas
        state[:, -1] += f32(1)
        steps = state[:, -1:].astype(np.float64)
        if self.decoupled:
            values *= f32(1 - lr * self.weight_decay)
            gradient = gradients
        else:
            gradient = _decay(gradients, values, self.weight_decay)
        mean += f32(1 - first) * (gradient - mean)
        square[:] = f32(second) * square + f32(1 - second) * (gradient * gradient)
        rate = (lr / (1 - first**steps)).astype(f32)
        correction = np.sqrt(1 - second**steps).astype(f32)
        values -= rate * (mean / (np.sqrt(square) / correction + f32(self.eps)))


@dataclass(frozen=True, config=_frozen)
class RMSprop(UpdateRule):
    """As `torch.optim.RMSprop` without momentum, not centered; one state value per element."""

    lr: Rate = 1e-2
    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    weight_decay: Rate = 0.0
    kind: Literal["rmsprop"] = "rmsprop"

    def state_columns(self, dim: int) -> int:
        """Return the mean square of each value."""
        return dim

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        gradient = _decay(gradients, values, self.weight_decay)
        state[:] = f32(self.alpha) * state + f32(1 - self.alpha) * (gradient * gradient)
        values -= f32(lr) * (gradient / (np.sqrt(state) + f32(self.eps)))


@dataclass(frozen=True, config=_frozen)
class FTRL(UpdateRule):
    """FTRL-proximal with L1 and L2; two state values per element (z and n).

    A row that never had a gradient is served as its initial value.
    """

    lr: Positive
    """Alpha of the paper."""

    beta: Rate = 1.0
    l1: Rate = 0.0
    l2: Rate = 0.0
    kind: Literal["ftrl"] = "ftrl"

    divides_by_lr: ClassVar[bool] = True
    supports_deltas: ClassVar[bool] = False

    def state_columns(self, dim: int) -> int:
        """Return z and n of each value."""
        return 2 * dim

    def update(self, values: Array, state: Array, gradients: Array, lr: float) -> None:
        """See `UpdateRule.update`."""
        dim = values.shape[1]
        z, n = state[:, :dim], state[:, dim:]
        alpha = f32(lr)
        grown = n + gradients * gradients
        z += gradients - ((np.sqrt(grown) - np.sqrt(n)) / alpha) * values
        n[:] = grown
        strength = (f32(self.beta) + np.sqrt(n)) / alpha + f32(self.l2)
        # With beta, l2 and n all 0 the strength is 0, and so is z: such an element has no gradient yet and is 0.
        pulled = np.divide(np.sign(z) * f32(self.l1) - z, strength, out=np.zeros_like(z), where=strength > 0)
        values[:] = np.where(np.abs(z) <= f32(self.l1), f32(0), pulled)


Rule = Annotated[
    SGD | Momentum | Adagrad | RowWiseAdagrad | Adam | RMSprop | FTRL,
    Field(discriminator="kind"),
]

RULES: tuple[type[UpdateRule], ...] = get_args(get_args(Rule)[0])
"""Every rule there is."""
