"""Words of older frameworks that a script types by habit, and what to write instead: one table for errors and docs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable

from phalanx.errors import did_you_mean

REPLACED: dict[str, str] = {
    # Fleet and its namespaces
    "Distributedstrategy": "fleet.DistributedStrategy",
    "main_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "_origin_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "default_main_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "default_startup_program": "nothing: parameters are initialised when the module is built",
    "incubate": "from phalanx import fleet",
    "fluid": "from phalanx import fleet",
    "fleet_base": "from phalanx import fleet",
    "minimize": "loss.backward(); optimizer.step()",
    # static graph
    "enable_static": "strategy.graph = True",
    "disable_static": "strategy.graph = False",
    "static": "px.train_step(model, loss_fn, optimizer)",
    "Executor": "px.train_step(model, loss_fn, optimizer); out = step(batch)",
    "CUDAPlace": "torch.device('cuda', n); the launcher picks the device (--gpus)",
    "CPUPlace": "torch.device('cpu')",
    "set_device": "phalanx run --gpus 0,1 (the launcher picks the device)",
    "set_image_backend": "Pillow is the only image backend of phalanx.data",
    # set_context and what stands in it
    "context": "px.set_auto_parallel_context(...); what set_context said, the launcher and the strategy say",
    "set_context": "nothing: the launcher picks the device (--gpus), ranks meet by themselves; strategy.graph compiles",
    "GRAPH_MODE": "strategy.graph = True, or px.Model(..., compiled=True)",
    "PYNATIVE_MODE": "nothing: steps are eager, on any number of ranks, unless strategy.graph = True",
    "enable_task_sink": "model.train(..., dataset_sink_mode=True)",
    "enable_loop_sink": "model.train(..., dataset_sink_mode=True, sink_size=100)",
    "get_rank": "px.init().rank, or phalanx.distributed.get_rank()",
    "get_group_size": "px.init().world_size",
    "CheckpointConfig": "px.ModelCheckpoint(folder, every_steps=500, keep=3)",
    "AutoParallel": "px.Model(net, loss_fn, optimizer, parallel_mode=...)",
    # twins in torch
    "Cell": "torch.nn.Module, with forward for construct",
    "SoftmaxCrossEntropyWithLogits": "torch.nn.CrossEntropyLoss(), or px.SoftmaxCrossEntropyExpand(sparse=True)",
    "Momentum": "torch.optim.SGD(..., momentum=0.9)",
    "L2Decay": "the optimizer's weight_decay=",
    "batch": "px.distribute(model, optimizer, dataset, global_batch=...)",
    "to_tensor": "torch.as_tensor",
    "save_dygraph": "px.save(folder, model, optimizer), or px.export_state_dict(model, path) for weights alone",
    "load_dygraph": "px.load(folder, model, optimizer), or px.load(path, model) for weights alone",
    "TracedLayer": "px.export_program(model, inputs, path)",
    # data pipelines
    "create_dict_iterator": "px.data.ShardedLoader(dataset.as_dicts())",
    "create_tuple_iterator": "px.data.ShardedLoader(dataset)",
    "device_que": "nothing: px.data.ShardedLoader hands out batches on the device",
    "get_col_names": "dataset.columns, of a reader dataset.pipeline().columns",
    "num_parallel_workers": "num_workers=4 of px.data.ShardedLoader, px.distribute and px.Model.train",
    "skip": "px.data.Pipeline(torch.utils.data.Subset(data, range(n, len(data))), columns)",
    "take": "px.data.Pipeline(torch.utils.data.Subset(data, range(n)), columns)",
    # optimizers
    "clear_gradients": "optimizer.zero_grad()",
    "clear_grad": "optimizer.zero_grad()",
}
"""Old word -> what to write; `px` is `import phalanx as px`."""


def replacement(name: str) -> str | None:
    """Return `"'name' is not here: write ..."` for a word of an older framework, or None for any other."""
    instead = REPLACED.get(name)
    return f"'{name}' belongs to an older framework. Write instead: {instead}" if instead else None


def missing(module: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for a name that a module does not have; to be raised by the module's `__getattr__`.

    Python answers `from module import name` with words of its own when it gets an AttributeError, so there it is an
    ImportError; everywhere else, `hasattr` among it, an AttributeError.

    Args:
        module: What was asked.
        name: What is not there.
        known: The names it has.
    """
    old = replacement(name)
    message = f"module '{module}' has no attribute '{name}'.{f' {old}.' if old else did_you_mean(name, known)}"
    asking = sys._getframe(2)  # Above this function and the module's __getattr__.
    is_import = asking.f_code.co_code[asking.f_lasti] == dis.opmap["IMPORT_FROM"]
    # With a name of its own Python does not add a guess to ours.
    return ImportError(message) if is_import else AttributeError(message, name=name)
