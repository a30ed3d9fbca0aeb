"""`phalanx plan SCRIPT`: run a training script until it would train, then plan its model or simulate a Plan."""

from __future__ import annotations

import inspect
import logging
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import nn

import phalanx.comm.context as context_of
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.to_plan import PLANNED_SETTINGS
from phalanx.auto.simulate.values import SimulatedStep
from phalanx.auto.simulate_plan import check_devices, simulate_plan
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError, PhalanxError
from phalanx.i18n import tr
from phalanx.parallel.session import TrainingRequest, session
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.train.auto_parallel import auto_parallel
from phalanx.train.model.planning import batch_size_of, global_batch, require_no_tables, with_batch_size

logger = logging.getLogger("phalanx.train")

T = TypeVar("T")


def plan_script(script: Path, arguments: Sequence[str], **options: Any) -> PlanResult:
    """Run a script as one process until it would train a model, and return the Plan for that model.

    What the script prints goes to standard error. The batch is one of the data that it trains on, with the samples of
    its global batch; a size per rank, such as that of a DataLoader, stands for as many samples on every device of the
    cluster.

    Args:
        script: A training script.
        arguments: Its own.
        **options: As `px.auto_parallel` takes them; optimizer, strategy and whether the loop keeps outputs are the
            script's own unless given.

    Raises:
        ConfigError: If the script fails, or ends without training a model that it distributes.
    """
    cluster = read_cluster(options.get("cluster") or "here")  # before the script runs: that may take minutes

    def plan(training: TrainingRequest) -> PlanResult:
        sample = _sample(training, cluster.devices)
        logger.info(
            "%s",
            tr(
                "planning {model} for a global batch of {rows} samples; --time-limit stops the search at the best Plan "
                "so far",
                model=type(training.model).__name__,
                rows=batch_size_of(sample),
            ),
        )
        own = {
            "optimizer": _optimizer(training, options),
            "strategy": _settings(training.strategy),
            "return_outputs": training.return_outputs,
        }
        return auto_parallel(training.model, sample, training.loss_fn, **(own | options | {"cluster": cluster}))

    return _run_until_training(script, arguments, plan)


def simulate_script(script: Path, arguments: Sequence[str], plan: Plan, **options: Any) -> SimulatedStep:
    """Run a script likewise, and return a step of its model under a Plan, event by event.

    Args:
        script: A training script.
        arguments: Its own.
        plan: Any Plan of its model.
        **options: As `px.simulate_plan` takes them; optimizer and whether the loop keeps outputs are the script's own
            unless given.

    Raises:
        ConfigError: As `plan_script` does.
        PlanError: As `px.simulate_plan` does.
    """
    cluster = read_cluster(options.get("cluster") or "here")
    check_devices(plan, cluster)

    def simulate(training: TrainingRequest) -> SimulatedStep:
        sample, optimizer = _sample(training, cluster.devices), _optimizer(training, options)
        return simulate_plan(
            plan,
            training.model,
            sample,
            training.loss_fn,
            cluster=cluster,
            optimizer=optimizer,
            return_outputs=options.get("return_outputs", training.return_outputs),
        )

    return _run_until_training(script, arguments, simulate)


def _run_until_training(script: Path, arguments: Sequence[str], use: Callable[[TrainingRequest], T]) -> T:
    """Run a script until it would train, and return what is made of that."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    session.planner = _stop
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(script.resolve()), run_name="__main__")  # as Python names it, which scripts build upon
    except _TrainingReached as reached:
        session.planner = None
        return use(reached.training)
    except SystemExit as ended:
        advice = tr(
            "Give a script that calls px.distribute(model, optimizer, data), fleet.distributed_model(model) or "
            "px.Model(...).train(...)."
        )
        raise ConfigError(
            tr(
                "{script} ended ({code}) before it trained a model. {advice}",
                script=script,
                code=ended.code,
                advice=advice,
            )
        ) from None
    except PhalanxError:
        raise
    except Exception as error:  # noqa: BLE001  # a script may raise anything
        raise ConfigError(_failed(script, error)) from None
    finally:
        sys.argv, sys.path[:] = argv, path
        session.planner = None
        if context_of.is_initialized():
            context_of.shutdown()
    raise ConfigError(
        tr(
            "{script} finished without training a distributed model. {advice}",
            script=script,
            advice=tr(
                "Give a script that calls px.distribute(model, optimizer, data), fleet.distributed_model(model) or "
                "px.Model(...).train(...)."
            ),
        )
    )


def _failed(script: Path, error: Exception) -> str:
    """Return the script's own traceback, without what ran it, and what that means."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script.resolve()):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    message = tr("{script} failed before it trained a model. Make `python {script}` work first:", script=script)
    return f"{message}\n{lines.rstrip()}"


class _TrainingReached(BaseException):
    """The script is about to train a model; no handler of its own is to catch it."""

    def __init__(self, training: TrainingRequest) -> None:
        super().__init__()
        self.training = training


def _stop(training: TrainingRequest) -> NoReturn:
    raise _TrainingReached(training)


def _optimizer(training: TrainingRequest, options: Mapping[str, Any]) -> Any:
    """Return the optimizer that was asked for, else the script's."""
    if training.optimizer is None and "optimizer" not in options:
        logger.info(
            "%s", tr("the script passes no optimizer, so the plan is for adam; choose another with --optimizer")
        )
    return options.get("optimizer", training.optimizer or "adam")


def _sample(training: TrainingRequest, ranks: int) -> Any:
    """Return what a global batch calls the model with, the target after it where there is a loss function."""
    require_no_tables(training.model)
    if training.inputs is None:
        assert session.loader is not None
        return global_batch(session.loader, training.model, has_target=training.has_target, ranks=ranks)
    inputs, named = training.inputs
    arguments = _by_name(training.model, inputs, named) if named else inputs
    rows, current = batch_size_of(arguments), context_of.current()
    if current.batch is None or current.rows_for is None:
        all_rows = rows * ranks  # the batch of a loader that knows nothing of ranks is that of one
    else:
        all_rows = rows * current.rows_for(ranks) // current.rows_for(current.world_size)
    return with_batch_size(arguments, rows, all_rows, training.model)


def _by_name(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return what a model is called with as keyword arguments alone.

    Raises:
        ConfigError: If some of it can only be told by its position.
    """
    signature = inspect.signature(model.forward)
    arguments = dict(signature.bind(*inputs, **named).arguments)
    for name in list(arguments):
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ConfigError(
                tr(
                    "{model} is called with keyword arguments beside {name}, which takes inputs by position alone. To "
                    "plan it, call it with one kind of them, or give its forward named parameters.",
                    model=type(model).__name__,
                    name=name,
                )
            )
    return arguments


def _settings(strategy: DistributedStrategy | None) -> DistributedStrategy:
    """Return the script's settings without those that the planner decides."""
    chosen, usual = strategy or DistributedStrategy(), DistributedStrategy()
    aside = [name for name in (*PLANNED_SETTINGS, "hybrid_configs") if getattr(chosen, name) != getattr(usual, name)]
    if aside:
        logger.info(
            "%s",
            tr("ignored settings of the script's strategy, which the planner decides: {names}", names=", ".join(aside)),
        )
    return chosen.model_copy(update={name: getattr(usual, name) for name in aside})
