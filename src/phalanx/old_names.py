"""Migration hints: names of Paddle, MindSpore and old Fleet APIs, and the error that says what to write instead.

Scripts write paths, `phalanx.optimizer.Momentum`; the table has words and ends or beginnings of paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

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
    "context": "px.set_auto_parallel_context(...); the launcher and the strategy replace set_context",
    "set_context": "nothing: the launcher picks the device (--gpus) and connects the ranks; strategy.graph compiles",
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
    "get_col_names": "dataset.columns; for a reader, dataset.pipeline().columns",
    "num_parallel_workers": "num_workers=4 in px.data.ShardedLoader, px.distribute or px.Model.train",
    "skip": "px.data.Pipeline(torch.utils.data.Subset(data, range(n, len(data))), columns)",
    "take": "px.data.Pipeline(torch.utils.data.Subset(data, range(n)), columns)",
    "c_transforms": "px.data.vision, with the same names; for a TypeCast to int64, tensor.long()",
    "dataset": "px.data, or a torch Dataset",
    "dataset.flowers": "px.data.FlowersDataset(...)",
    "Cifar10Dataset": "px.data.Cifar10Dataset(...)",
    "from_generator": "px.data.ShardedLoader(dataset, batch_size=...)",
    "io": "torch.utils.data, or px.data.ShardedLoader(dataset, batch_size=...)",
    "io.load_inference_model": "torch.export.load(path).module()",
    "io.save_inference_model": "px.export_program(model, inputs, path)",
    "vision": "px.data.vision for transforms, torchvision for models",
    "vision.models": "torchvision.models, or your own torch.nn.Module",
    "common_ops_import": "nothing: the for loop over a loader ends when the data ends",
    "EOFException": "nothing: the for loop over a loader ends when the data ends",
    # tensors and layers
    "nn": "torch.nn",
    "nn.functional": "torch.nn.functional",
    "Layer": "torch.nn.Module",
    "Conv2D": "torch.nn.Conv2d",
    "dygraph": "torch itself: steps are eager",
    "prepare_context": "fleet.prepare_context(), or px.init()",
    "init_parallel_env": "fleet.init_parallel_env(), or px.init()",
    "ops": "torch and torch.nn.functional, the same operations",
    "common": "torch: torch.float32, torch.nn.init",
    "Tensor": "torch.Tensor",
    "Parameter": "torch.nn.Parameter",
    "ParamAttr": "the layer's own weight and bias; torch.nn.init sets them",
    "mean": "torch.mean",
    "concat": "torch.cat",
    "split": "torch.split",
    "reshape": "torch.reshape",
    "randn": "torch.randn",
    "randint": "torch.randint",
    "no_grad": "torch.no_grad()",
    "seed": "torch.manual_seed",
    "metric": "px.accuracy(out, label, k=5), px.evaluate(model, data, metrics=[...])",
    "jit": "px.export_program(model, inputs, path); strategy.graph = True compiles training",
    "jit.save": "px.export_program(model, inputs, path)",
    "jit.load": "torch.export.load(path).module()",
    "ProgramTranslator": "strategy.graph = True",
    # roles and tables
    "sparse_embedding": "px.ps.SparseEmbedding(dim)",
    "embedding": "torch.nn.Embedding(n, dim), or px.ps.SparseEmbedding(dim) on parameter servers",
    "static.data": "nothing: the step takes tensors as they come",
    "UserDefinedRoleMaker": "fleet.init(): the role is read from the launcher's environment",
    "PaddleCloudRoleMaker": "fleet.init(): the role is read from the launcher's environment",
    "UtilBase": "px.comm for collectives; px.data splits files over the ranks",
    "util": "px.comm for collectives; px.data splits files over the ranks",
    "utils": "px.comm for collectives; px.data splits files over the ranks",
    "InMemoryDataset": "px.data.InMemoryDataset(...)",
    "QueueDataset": "px.data.QueueDataset(...)",
    "parameter_server": "strategy.a_sync and strategy.a_sync_configs",
    "DistributeTranspiler": "strategy.a_sync and strategy.a_sync_configs",
    "spawn": "phalanx run -n 2 train.py",
    "communication": "px.init(); it returns rank and world_size",
    "train.callback": "px.LossMonitor, px.TimeMonitor, px.ModelCheckpoint and others of px",
    # optimizers
    "optimizer": "torch.optim",
    "optim": "torch.optim",
    "regularizer": "the optimizer's weight_decay=",
    "amp_init": "strategy.amp = True",
    "clear_gradients": "optimizer.zero_grad()",
    "clear_grad": "optimizer.zero_grad()",
}
"""Old word or path -> what to write; `px` is `import phalanx as px`."""


def replacement(path: str) -> str | None:
    """Return `"'path' belongs to an older framework. Write instead: ..."`, or None for any other.

    Args:
        path: A word, or words with dots. What is known of how it ends counts before what is known of how it begins.
    """
    words = path.split(".")
    ends = [".".join(words[first:]) for first in range(len(words))]
    beginnings = [".".join(words[:count]) for count in range(len(words) - 1, 0, -1)]
    for candidate in (*ends, *beginnings):
        if instead := REPLACED.get(candidate):
            return f"'{path}' belongs to an older framework. Write instead: {instead}"
    return None


def missing(module: str, name: str, names: Iterable[str]) -> Exception:
    """Return the error for a name that a module does not have; to be raised by the module's `__getattr__`.

    Python answers `from module import name` with words of its own when it gets an AttributeError, so there it is an
    ImportError; everywhere else, `hasattr` among it, an AttributeError.

    Args:
        module: What was asked.
        name: What is not there.
        names: The names it has.
    """
    path, is_import = _requested_path(sys._getframe(2), name)  # above this function and the module's __getattr__
    old = replacement(path)
    message = f"module '{module}' has no attribute '{name}'.{f' {old}.' if old else did_you_mean(name, names)}"
    # With a name of its own Python does not add a guess to ours.
    return ImportError(message) if is_import else AttributeError(message, name=name)


def _requested_path(asking: FrameType, name: str) -> tuple[str, bool]:
    """Return the path that code asks for, of which `name` is the first word, and whether it imports that word."""
    import dis

    words: list[str] = []
    if name.startswith("__"):
        return name, False
    for step in dis.get_instructions(asking.f_code):
        if step.offset < asking.f_lasti:
            continue
        if not words and step.opname == "IMPORT_FROM":
            return name, True
        # What follows the first word, as in `phalanx.optimizer.Momentum`.
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or (not words and step.argval != name):
            break
        words.append(str(step.argval))
    return ".".join(words) or name, False


class _OldModules:
    """Answers `import phalanx.fluid` with what to write. Asked when no module of that name is found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise for a module of an older framework; find nothing else.

        Raises:
            ModuleNotFoundError: Says what to write instead.
        """
        package, _, rest = name.partition(".")
        if package == "phalanx" and (old := replacement(rest)):
            raise ModuleNotFoundError(f"No module named '{name}'. {old}.", name=name)


def answer_imports() -> None:
    """Have imports of modules that older frameworks have say what to write."""
    if _OldModules not in sys.meta_path:
        sys.meta_path.append(_OldModules)
