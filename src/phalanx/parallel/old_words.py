"""`with_old_words`: the calls of Paddle's scripts on models and optimizers, which do nothing or say what to write."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.old_names import replacement
from phalanx.parallel.session import session

logger = logging.getLogger("phalanx.parallel")

ModelT = TypeVar("ModelT", bound=nn.Module)


def with_old_words(model: ModelT) -> ModelT:
    """Give a module the calls that older scripts make around backward, which do nothing or say what to write.

    The module's own stay.
    """
    # Module-level functions, so that the model can still be pickled and copied.
    old = {
        "scale_loss": _scale_loss,
        "apply_collective_grads": _apply_collective_grads,
        "clear_gradients": _clear_gradients,
    }
    for word, function in old.items():
        if not hasattr(model, word):
            setattr(model, word, function)
    return model


def refuse_old_words(optimizer: Optimizer) -> None:
    """Let an optimizer's older calls be errors that say what to write."""
    for word in ("minimize", "clear_grad", "clear_gradients"):
        setattr(optimizer, word, partial(_refuse_word, word))


def _scale_loss(loss: Tensor) -> Tensor:
    _name_old_words()
    return loss


def _apply_collective_grads() -> None:
    _name_old_words()


def _name_old_words() -> None:
    if not session.has_named_old_words:
        session.has_named_old_words = True
        logger.warning(
            "scale_loss and apply_collective_grads are not needed: gradients are averaged over the ranks during "
            "backward. Remove the calls."
        )


def _clear_gradients() -> None:
    raise ConfigError(f"model.clear_gradients(): {replacement('clear_gradients')}")


def _refuse_word(word: str, *_: Any, **__: Any) -> None:
    raise ConfigError(f"optimizer.{word}(): {replacement(word)}")
