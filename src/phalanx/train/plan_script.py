"""Plan the model of a script for a cluster that need not be there: the script runs until it would train."""

from __future__ import annotations

import inspect
import logging
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import phalanx.comm.context as context_of
from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.planned import Planned
from phalanx.cluster.messages import text
from phalanx.errors import ConfigError, PhalanxError
from phalanx.parallel.watch import assembly
from phalanx.train.batches import LossFunction
from phalanx.train.plan_ahead import global_batch

logger = logging.getLogger("phalanx.train")


def plan_script(script: Path, arguments: Sequence[str], **options: Any) -> Planned:
    """Run a script as one process until it would train a model, and return the Plan for that model.

    What the script prints goes to standard error. The batch is one of the data that it trains on, with the rows of its
    global batch.

    Args:
        script: A training script.
        arguments: Its own.
        **options: As `px.auto_parallel` takes them.

    Raises:
        ConfigError: If the script fails, or ends without training on data that it distributes.
    """
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    assembly.planner = _stop
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(script.resolve()), run_name="__main__")  # as Python names it, which scripts build upon
    except _Reached as reached:
        return _planned(reached.model, reached.loss_fn, options)
    except SystemExit as ended:
        advice = text("script to plan")
        raise ConfigError(text("script ended", script=script, code=ended.code, advice=advice)) from None
    except PhalanxError:
        raise
    except Exception as error:  # noqa: BLE001  # a script may raise anything
        raise ConfigError(_failed(script, error)) from None
    finally:
        sys.argv, sys.path[:] = argv, path
        assembly.planner = None
        if context_of.is_initialized():
            context_of.shutdown()
    raise ConfigError(text("script trained nothing", script=script, advice=text("script to plan")))


def _failed(script: Path, error: Exception) -> str:
    """Return the script's own traceback, without what ran it, and what that means."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script.resolve()):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    return f"{text('script failed', script=script)}\n{lines.rstrip()}"


class _Reached(BaseException):
    """The script is about to train a model; no handler of its own is to catch it."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn


def _stop(model: nn.Module, loss_fn: LossFunction | None) -> NoReturn:
    raise _Reached(model, loss_fn)


def _planned(model: nn.Module, loss_fn: LossFunction | None, options: dict[str, Any]) -> Planned:
    assert assembly.loader is not None
    logger.info("%s", text("planning", model=type(model).__name__))
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    columns = global_batch(assembly.loader, device, has_target=loss_fn is not None)
    if loss_fn is not None:
        return auto_parallel(model, columns, loss_fn, **options)
    inputs = columns[:-1]  # the last column is the target
    try:
        inspect.signature(model.forward).bind(*inputs)
    except TypeError:
        inputs = columns  # of a model that returns its own loss
    return auto_parallel(model, inputs, **options)
