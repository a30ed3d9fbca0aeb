"""Words of older frameworks get an error that says what to write, from one table that the docs show too."""

import importlib
import importlib.util
import re
import traceback
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx import distributed, fleet
from phalanx.errors import ConfigError
from phalanx.old_names import REPLACED
from phalanx.parallel.old_words import with_old_words

DOCS = Path(__file__).parents[2] / "docs" / "coming-from.md"


@pytest.mark.parametrize("module", [phalanx, fleet, distributed], ids=lambda m: m.__name__)
@pytest.mark.parametrize("word", sorted(REPLACED))
def test_an_old_word_says_what_to_write(module, word):
    if word in module.__all__:  # `get_rank` of phalanx.distributed
        return
    with pytest.raises(AttributeError, match="Write instead"):
        getattr(module, word)


@pytest.mark.parametrize("module", ["phalanx", "phalanx.fleet", "phalanx.distributed"])
def test_an_import_of_an_old_word_says_so_too(module):
    with pytest.raises(ImportError, match="Write instead: from phalanx import fleet"):
        exec(f"from {module} import fluid")
    with pytest.raises(ImportError, match="Did you mean 'DistributedStrategy'"):
        exec(f"from {module} import DistributedStrateg")
    assert not hasattr(importlib.import_module(module), "fluid")


PATHS = {
    # collective training, eager and as a static graph
    "phalanx.enable_static()": "strategy.graph = True",
    "phalanx.vision.set_image_backend('cv2')": "Pillow",
    "phalanx.static.default_main_program()": "train_step",
    "phalanx.static.default_startup_program()": "initialised",
    "phalanx.static.data(name='image')": "tensors as they come",
    "phalanx.static.Executor(place)": "train_step",
    "phalanx.CPUPlace()": "torch.device",
    "phalanx.CUDAPlace(0)": "torch.device",
    "phalanx.nn.Layer": "torch.nn",
    "phalanx.nn.Conv2D": "Conv2d",
    "phalanx.nn.functional.cross_entropy": "torch.nn.functional",
    "phalanx.nn.embedding": "SparseEmbedding",
    "phalanx.mean(loss)": "torch.mean",
    "phalanx.concat([x])": "torch.cat",
    "phalanx.split(x, 2)": "torch.split",
    "phalanx.reshape(x, [2])": "torch.reshape",
    "phalanx.randn([2])": "torch.randn",
    "phalanx.randint(0, 2)": "torch.randint",
    "phalanx.no_grad()": "torch.no_grad",
    "phalanx.metric.accuracy(input=x, label=y)": "px.accuracy",
    "phalanx.batch(reader, batch_size=32)": "global_batch",
    "phalanx.dataset.flowers.train(use_xmap=True)": "FlowersDataset",
    "phalanx.io.DataLoader.from_generator(capacity=32)": "ShardedLoader",
    "phalanx.common_ops_import.core.EOFException": "when the data ends",
    "phalanx.optimizer.Momentum(learning_rate=0.1)": "momentum=0.9",
    "phalanx.optimizer.SGD": "torch.optim",
    "phalanx.optimizer.Adam": "torch.optim",
    "phalanx.fluid.optimizer": "torch.optim",
    "phalanx.regularizer.L2Decay(0.0001)": "weight_decay",
    "phalanx.vision.models.LeNet()": "torchvision",
    "phalanx.jit.save": "export_program",
    "phalanx.jit.load": "torch.export.load",
    "phalanx.fluid.dygraph.prepare_context()": "px.init()",
    "phalanx.fluid.io.load_inference_model": "torch.export.load",
    "phalanx.fluid.save_dygraph": "px.save",
    "phalanx.fluid.load_dygraph": "px.load",
    "phalanx.fluid.incubate.fleet.collective.DistributedStrategy": "fleet",
    "phalanx.fluid.incubate.fleet.parameter_server.distribute_transpiler": "fleet",
    "fleet.Distributedstrategy()": "fleet.DistributedStrategy",
    "fleet.main_program": "train_step",
    "fleet._origin_program": "train_step",
    # parameter servers
    "phalanx.static.nn.sparse_embedding(input=x)": "px.ps.SparseEmbedding",
    "fleet.UserDefinedRoleMaker": "launcher's environment",
    "fleet.PaddleCloudRoleMaker()": "launcher's environment",
    "fleet.UtilBase": "px.data",
    "fleet.util.get_file_shard": "px.data",
    "fleet.InMemoryDataset()": "px.data.InMemoryDataset",
    "fleet.QueueDataset()": "px.data.QueueDataset",
    "phalanx.distributed.spawn(train)": "phalanx run",
    # context, Model and pipelines
    "phalanx.context.set_context(mode=1)": "launcher picks the device",
    "phalanx.context.GRAPH_MODE": "compiled=True",
    "phalanx.nn.Cell": "forward for construct",
    "phalanx.nn.optim.momentum.Momentum": "momentum=0.9",
    "phalanx.Tensor": "torch.Tensor",
    "phalanx.Cifar10Dataset": "px.data.Cifar10Dataset",
    "phalanx.data.c_transforms": "px.data.vision",
    "phalanx.ops.operations": "torch",
    "phalanx.metric": "px.evaluate",
}
"""What scripts of older frameworks type, package by package under our name, and a part of the right answer."""

IMPORTS = {
    "import phalanx.nn as nn": "torch.nn",
    "import phalanx.nn.functional as F": "torch.nn",
    "import phalanx.static": "train_step",
    "import phalanx.fluid": "from phalanx import fleet",
    "from phalanx.fluid.incubate.fleet.collective import fleet": "from phalanx import fleet",
    "from phalanx.fluid.dygraph import Conv2D": "from phalanx import fleet",
    "from phalanx.incubate import fleet": "from phalanx import fleet",
    "from phalanx.communication.management import init": "px.init()",
    "from phalanx.train.callback import LossMonitor": "px.LossMonitor",
    "from phalanx.ops import operations as P": "torch.nn.functional",
    "import phalanx.common.dtype as mstype": "torch.float32",
    "import phalanx.dataset.transforms.vision.c_transforms as C": "px.data",
    "from phalanx.nn.optim.momentum import Momentum": "torch.nn",
    "from phalanx import context": "set_auto_parallel_context",
    "from phalanx import Tensor": "torch.Tensor",
}


@pytest.mark.parametrize("typed", PATHS)
def test_a_path_typed_by_habit_says_what_to_write(typed):
    with pytest.raises(AttributeError, match=f"Write instead: .*{re.escape(PATHS[typed])}"):
        eval(typed, {"phalanx": phalanx, "fleet": fleet})


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_typed_by_habit_says_what_to_write(line):
    with pytest.raises(ImportError, match=f"Write instead: .*{re.escape(IMPORTS[line])}"):
        exec(line, {})


@pytest.mark.parametrize(
    "line",
    [
        "from phalanx.distributed import fleet",
        "import phalanx.distributed.fleet as fleet",
        "from phalanx.train.model.model import Model",
        "phalanx.DataParallel, phalanx.save, phalanx.load, phalanx.Model, phalanx.ParallelMode",
        "phalanx.distributed.init_parallel_env, phalanx.distributed.get_rank, phalanx.distributed.get_world_size",
        "phalanx.distributed.all_gather, phalanx.distributed.DistributedStrategy, phalanx.data.Cifar10Dataset",
    ],
)
def test_what_is_the_same_here_resolves(line):
    exec(line, {"phalanx": phalanx})


def test_a_module_nobody_had_gets_pythons_own_words():
    assert importlib.util.find_spec("phalanx.zzz") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'phalanx\.zzz'$"):
        importlib.import_module("phalanx.zzz")


@pytest.mark.parametrize("verb", ["save_persistables", "save_inference_model"])
def test_an_executor_is_refused_with_what_to_write(verb):
    for arguments in ((object(), "folder"), ("folder", ["x"], ["y"], object())):
        with pytest.raises(ConfigError, match=rf"Write fleet\.{verb}\(directory\)"):
            getattr(fleet, verb)(*arguments)


def test_gradients_are_cleared_by_the_optimizer():
    model = with_old_words(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"Write instead: optimizer\.zero_grad\(\)"):
        model.clear_gradients()


def test_the_docs_show_the_whole_table():
    text = DOCS.read_text()
    for word, instead in REPLACED.items():
        assert f"| `{word}` | {instead} |" in text


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(AttributeError, match="Did you mean 'distribute'"):
        _ = phalanx.distrubute
    with pytest.raises(AttributeError, match="Did you mean 'distributed_model'"):
        _ = fleet.distribute_model


def test_python_adds_no_guess_of_its_own():
    for module, word in ((phalanx, "Callbacks"), (phalanx.ps, "Adagrat")):
        with pytest.raises(AttributeError) as caught:
            getattr(module, word)
        assert "".join(traceback.format_exception(caught.value)).count("Did you mean") == 1


def test_every_public_name_resolves():
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None


def test_fleet_is_one_module_under_all_its_names():
    import phalanx.distributed.fleet as by_path
    from phalanx.distributed import fleet as by_name

    assert by_path is by_name is fleet is phalanx.fleet
