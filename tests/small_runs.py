"""A small training loop with callbacks, for tests: `run, model = train([callback], epochs=3)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.train.callbacks.run import Run

ROWS = 23


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def train(
    callbacks: Iterable[px.Callback],
    *,
    epochs: int = 3,
    global_batch: int = 6,
    sink: int = 1,
    resume: str | Path | None = None,
    strategy: Any = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
) -> tuple[Run, nn.Module]:
    """Train a linear model on 23 rows: 4 batches an epoch, the last of 5 rows."""
    torch.manual_seed(3)
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = px.data.ShardedLoader(data(), global_batch=global_batch)
    model, optimizer, loader = px.distribute(model, optimizer, loader, strategy=strategy)
    step = px.train_step(model, nn.functional.mse_loss, optimizer)
    run = Run(model=model, optimizer=optimizer, loader=loader, epochs=epochs, callbacks=callbacks, steps_in_sink=sink)
    if resume is not None:
        run.resume(resume)
    with run:
        while run.begin_epoch():
            in_sink = 0
            for batch in loader:
                in_sink += run.batch_done(step(*batch).loss)
                is_last = run.batches == run.steps_per_epoch
                if in_sink == sink or (in_sink and is_last):
                    in_sink = 0
                    if run.end_step():
                        break
            else:
                if evaluate is not None:
                    with run.evaluating():
                        metrics = evaluate(model)
                    run.end_evaluation(metrics)
                run.end_epoch()
    return run, model
