"""`px.Model`: train, evaluate and predict with a net, a loss and an optimizer.

It is `px.distribute`, `px.train_step`, `ShardedLoader` and `px.evaluate` in the usual order; there is no other engine.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from phalanx.comm import context
from phalanx.data.loader.binding import Binding, Inputs, LossFunction, bind, call
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.samples.batch import move_to_device
from phalanx.errors import ConfigError
from phalanx.parallel.checks.consistency import make_consistent
from phalanx.parallel.session import applied_to
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy, check_strategy
from phalanx.train.callbacks.base import Callback, check_evaluated, read_callbacks
from phalanx.train.callbacks.checkpoint import checkpoint_folder
from phalanx.train.callbacks.run import Run
from phalanx.train.loss.batch_norm_check import check_batch_norms
from phalanx.train.loss.batch_reader import BatchReader, MeanLoss, columns_of, explain_dtype_errors
from phalanx.train.loss.expanded_loss import SoftmaxCrossEntropyExpand, logits_spec
from phalanx.train.loss.model_loss import loss_of
from phalanx.train.metrics.torchmetrics import TorchMetric
from phalanx.train.model.auto_context import close_context
from phalanx.train.model.evaluate import evaluate, evaluation_loader, evaluation_mode, gather_output
from phalanx.train.model.metric_names import Metric, read_metrics
from phalanx.train.model.mode_rules import read_mode
from phalanx.train.model.modes import ParallelMode
from phalanx.train.model.predict import one_batch, outputs_in_order
from phalanx.train.model.setup import ModelSetup, check_epochs, check_parts, distribute_optimizer, one_pass
from phalanx.train.step.sink import can_capture, check_sinkable, steps_in_sink, train_epoch
from phalanx.train.step.step import TrainStep

Metrics = Iterable[str | Metric] | Mapping[str, str | Metric] | str | Metric


class Model:
    """A net with what trains it.

        model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1), metrics=["acc1"])
        model.train(10, dataset, callbacks=[px.LossMonitor()], global_batch=256)
        print(model.eval(test_set))

    The same script runs as one process and on any number of ranks (`phalanx run -n 2`); at equal global batches losses
    are equal. Nothing is distributed before the first `train`, `eval` or `predict`, which are collective: every rank
    makes the same Model and calls the same methods in the same order. The net, which may be distributed already, and
    the optimizer stay the same objects.

    Args:
        net: A module. Called with the inputs of a batch: all columns but the target, which is the one called `label`,
            `labels`, `target`, `targets` or `y`, or where columns have no names the last. Columns that have names are
            given by name.
        loss_fn: A function of (output, target) to the mean over the samples. When None the net takes all columns and
            returns its loss, as one element or under the name `loss`, as models of transformers do.
        optimizer: Any torch optimizer over the net's parameters; None for a Model that only evaluates.
        metrics: What `eval` computes beside the loss, as `px.evaluate` takes it.
        strategy: How it trains on several ranks.
        plan: A Plan instead of a strategy.
        parallel_mode: The mode, if not set by `set_auto_parallel_context`; whatever the ranks and the strategy say
            when None.
        compiled: Whether steps are compiled; as the strategy says (`graph`) when None.

    Raises:
        ConfigError: If one of these is of another kind, or they contradict each other.
    """

    def __init__(
        self,
        net: nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: Optimizer | None = None,
        metrics: Metrics | None = None,
        *,
        strategy: DistributedStrategy | None = None,
        plan: Plan | None = None,
        parallel_mode: ParallelMode | str | None = None,
        compiled: bool | None = None,
    ) -> None:
        check_parts(net, loss_fn, optimizer)
        if plan is not None and strategy is not None:
            raise ConfigError("Model takes a strategy or a plan, found both: a strategy makes a plan. Leave one out.")
        self.net = net
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.metrics = metrics
        self.parallel_mode = read_mode(parallel_mode)
        self._loss: LossFunction = loss_of if loss_fn is None else MeanLoss(loss_fn)
        self._setup = ModelSetup(
            net,
            None if loss_fn is None else self._loss,
            optimizer,
            mode=self.parallel_mode,
            strategy=None if strategy is None else check_strategy(strategy),
            plan=plan,
            compiled=compiled,
        )
        self._is_training = False
        self._params = None if applied_to(net) is not None else _count_params(net)
        """Number of parameters of the full net; None when it was distributed before, and this rank may hold a part."""

        self._read_to_train = BatchReader(net, target="too" if loss_fn is None else "apart")
        self._read_to_predict = BatchReader(net, target="if needed")
        self._steps: dict[tuple[Binding, bool], TrainStep] = {}
        """By how the net is called, and whether it is captured."""

        close_context(self)

    def __repr__(self) -> str:
        loss, optimizer, applied = self.loss_fn, self.optimizer, applied_to(self.net)
        ranks = 0 if applied is None else applied.plan.world_size
        params = _count_params(self.net) if self._params is None else self._params
        parts = [
            f"{type(self.net).__name__} of {params:,} parameters{' on this rank' * (self._params is None)}",
            "its own loss" if loss is None else f"loss {getattr(loss, '__name__', type(loss).__name__)}",
            "no optimizer" if optimizer is None else type(optimizer).__name__,
            "" if self.parallel_mode is None else self.parallel_mode.name,
            "not distributed yet" if applied is None else f"on {ranks} rank{'s' * (ranks != 1)}",
        ]
        return f"Model({', '.join(filter(None, parts))})"

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Callback | Iterable[Callback] | None = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        *,
        valid_dataset: Any = None,
        resume: str | Path | bool = False,
        **loader_options: Any,
    ) -> Run:
        """Train for a number of passes over the data. Collective.

        Args:
            epoch: Passes over the data, whatever its `repeat` says; the total, when training is resumed.
            train_dataset: A data pipeline, `ShardedLoader`, torch Dataset or DataLoader, or tuple of tensors.
            callbacks: Hooks at the boundaries of steps, sinks and epochs.
            dataset_sink_mode: Whether several steps run without a host synchronisation: callbacks act once a sink, and
                on one CUDA device forward and backward pass are one CUDA graph. Losses are the same.
            sink_size: Steps of a sink; -1 for a whole epoch. The last of an epoch may be shorter.
            valid_dataset: Evaluated after each epoch; callbacks find the result as `run.metrics`.
            resume: A folder of `px.ModelCheckpoint`, or True for that of the one among the callbacks: resume from the
                newest checkpoint there, with the batch after the last that was trained on; from the start where there
                is none.
            **loader_options: As `px.distribute` takes them: `global_batch`, `batch_size`, `shuffle`, `seed`, ...

        Returns:
            The run: its last loss, metrics, number of steps, and why it stopped.

        Raises:
            ConfigError: If something cannot work; on all ranks, before training starts.
        """
        self._check_idle()
        check_epochs(epoch)
        if self.optimizer is None:
            raise ConfigError("Model.train needs an optimizer, and this Model was made without. Give it to Model.")
        if train_dataset is None:
            raise ConfigError("Model.train needs data, found None.")
        acting, evaluated = read_callbacks(callbacks), None
        if valid_dataset is None:
            check_evaluated(acting)
        else:
            evaluated = self._check_evaluation(valid_dataset)
        self._setup.join("Model.train")
        loader = self._setup.loader(train_dataset, loader_options, inspect.signature(self.train).parameters)
        sink = steps_in_sink(dataset_sink_mode, sink_size, loader)
        if dataset_sink_mode:
            check_sinkable(self.net)
        if not self.net.training:
            self.net.train()
        self._distribute(loader)
        distribute_optimizer(self.optimizer, loader)
        check_batch_norms(self.net, loader)
        with self._training():
            run = Run(
                model=self.net,
                optimizer=self.optimizer,
                loader=loader,
                epochs=epoch,
                callbacks=acting,
                steps_in_sink=sink,
                evaluated=evaluated,
            )
            if resume:
                run.resume(checkpoint_folder(run.callbacks) if resume is True else resume)
            captured = dataset_sink_mode and can_capture(self.net, context.current(), compiled=self._setup.compiles)
            with run:
                while run.begin_epoch():
                    if train_epoch(run, sink, partial(self._train_on, run, captured)):
                        break
                    if valid_dataset is not None:
                        with run.evaluating():
                            metrics = self.eval(valid_dataset)
                        run.end_evaluation(metrics)
                    run.end_epoch()
        return run

    fit = train

    def eval(
        self,
        dataset: Any,
        metrics: Metrics | None = None,
        dataset_sink_mode: bool = False,
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Return the loss and each metric over all samples of the data, exact on any number of ranks. Collective.

        Args:
            dataset: Anything `train` takes. Every sample counts once.
            metrics: What to compute; the Model's when None.
            dataset_sink_mode: Accepted: an evaluation never looks at values before its end.
            batch_size: Samples per rank; the data's own, or 64 when None.

        Raises:
            ConfigError: If there is nothing to compute, or the data does not fit.
        """
        chosen, loss = self._evaluated(metrics)
        self._setup.join("Model.eval")
        self._distribute()
        return evaluate(self.net, one_pass(dataset), chosen, loss_fn=loss, batch_size=batch_size)

    def predict(self, *data: Any, batch_size: int | None = None) -> Any:
        """Return what the net gives, in evaluation mode and without gradients. Collective.

        Args:
            *data: The inputs of one batch, as tensors or arrays, or one dictionary of them: each rank gets its own
                outputs, on its device. Or data as `train` takes it, whose targets are ignored unless the net has a
                parameter of their name: every rank gets the outputs of all samples, in the order of the data, on the
                CPU; of a mapping, such as a ModelOutput, a dictionary of the entries with one row for each sample.
            batch_size: Samples per rank for the latter; the data's own, or 64 when None.

        Raises:
            ConfigError: If the data has an order of its own.
        """
        current = self._setup.join("Model.predict")
        self._distribute()
        with evaluation_mode(self.net), torch.no_grad():
            if (columns := one_batch(data)) is not None:
                binding = bind(self.net, tuple(columns), is_ordered=not isinstance(data[0], Mapping))
                tensors = {
                    name: move_to_device(torch.as_tensor(part), current.device) for name, part in columns.items()
                }
                return self._output(binding.inputs(tensors), tensors)
            if len(data) != 1:
                kinds = ", ".join(type(part).__name__ for part in data) or "nothing"
                raise ConfigError(f"Model.predict takes the tensors of one batch, or one dataset; found {kinds}.")
            loader = evaluation_loader(one_pass(data[0]), batch_size, "predict", shuffle=False)
            make_consistent(self.net, "Model.predict")
            names = loader.columns
            return outputs_in_order(
                loader, lambda batch: self._output(self._read_to_predict(batch, names)[0], columns_of(batch, names))
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        if self._is_training:
            raise ConfigError(
                "Model.train was called while this Model trains, by one of its callbacks. Let the callback call "
                "run.stop(reason), and train again when train has returned; eval and predict may be called at any time."
            )

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def _evaluated(self, metrics: Metrics | None) -> tuple[Metrics, LossFunction | None]:
        """Return the metrics and the loss of an evaluation."""
        chosen = metrics if metrics is not None else (self.metrics if self.metrics is not None else ())
        return chosen, self._loss if self.loss_fn is not None or not chosen else None

    def _check_evaluation(self, dataset: Any) -> list[str] | None:
        """Raise before training what an evaluation after the first epoch would; return the metrics it will give.

        None where one of torchmetrics, which may name what it gives itself, leaves that open.
        """
        chosen = read_metrics(*self._evaluated(None))
        evaluation_loader(one_pass(dataset), None)
        return None if any(isinstance(metric, TorchMetric) for metric in chosen.values()) else list(chosen)

    def _distribute(self, loader: ShardedLoader | None = None) -> None:
        """Distribute the net, if it is not yet, and place the loss with it. Collective."""
        self._setup.distribute(loader)
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.to(context.current().device)
        if isinstance(self.loss_fn, SoftmaxCrossEntropyExpand) and self.loss_fn.axis is None:
            self.loss_fn.spec = logits_spec(self.net)

    def _train_on(self, run: Run, captured: bool, batch: Any) -> bool:
        """Take one step; return whether the parameters were updated."""
        names = run.loader.columns
        step = self._step(self._read_to_train.binding(batch, names)[0], captured)
        before = step.train_s, step.compile_s
        loss = step.take(*self._read_to_train(batch, names), columns_of(batch, names)).loss
        run.train_s += step.train_s - before[0]
        run.compile_s += step.compile_s - before[1]
        return run.batch_done(loss)

    def _step(self, binding: Binding, captured: bool) -> TrainStep:
        if (cached := self._steps.get((binding, captured))) is not None:
            return cached
        assert self.optimizer is not None
        step = TrainStep(self.net, self._loss, self.optimizer, {}, self._setup.compiles, captured=captured)
        self._steps[binding, captured] = step
        return step

    def _output(self, inputs: Inputs, columns: Mapping[Any, Any]) -> Any:
        """Return the net's output, gathered where its logits are sharded over ranks."""
        with explain_dtype_errors(self.net, columns):
            output = call(self.net, inputs)
        spec = logits_spec(self.net)
        return output if spec is None else gather_output(output, spec)


def _count_params(net: nn.Module) -> int:
    """Return the number of parameters, without those whose shape the first batch will tell."""
    return sum(param.numel() for param in net.parameters() if not is_lazy(param))
