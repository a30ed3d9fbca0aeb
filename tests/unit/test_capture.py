"""A captured step is what a real step does, and capturing it changes nothing."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from examples.alexnet_hybrid.model import AlexNet
from examples.resnet.model import ResNet
from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.grouped_product import run_grouped_product
from phalanx.auto.capture.step import Arguments, _advice, capture
from phalanx.errors import ConfigError

Loss = Callable[[Any, Any], Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, fused)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, *, tied: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def words() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 8, dtype=torch.long), torch.zeros(16, dtype=torch.long)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, size, size), torch.zeros(2, dtype=torch.long)


def real_step(model: nn.Module, sample: tuple[Tensor, Tensor], loss_fn: Loss) -> tuple[int, int]:
    """Return floating-point operations of a real step, and the bytes of memory that it saves for backward."""
    held = (*model.parameters(), *model.buffers(), *sample)
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_fn(model(sample[0]), sample[1])
        loss.backward()
    return counter.get_total_flops(), sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(
    ("build", "sample"),
    [
        (lambda: ResNet(10, 18, width=4), images(32)),
        (lambda: ResNet(10, 50, width=4), images(32)),
        (lambda: AlexNet(10), images(224)),
        (lambda: GPT(), words()),
        (lambda: GPT(tied=True), words()),
    ],
    ids=["resnet18", "resnet50", "alexnet", "gpt", "gpt tied"],
)
def test_flops_and_kept_bytes_are_those_of_a_real_step(
    build: Callable[[], nn.Module], sample: tuple[Tensor, Tensor]
) -> None:
    model = build()
    captured = capture(model, sample, F.cross_entropy)
    flops, kept = real_step(model, sample, F.cross_entropy)
    assert captured.level == "graph"
    assert captured.flops == flops > 0
    assert captured.saved_bytes == pytest.approx(kept, rel=0.05)


def test_fused_attention_counts_as_its_two_products() -> None:
    spelled, fused = (capture(GPT(fused=fused), words(), F.cross_entropy) for fused in (False, True))
    attention = [op for op in fused.operators if "flash_attention" in op.name]
    assert [op.phase for op in attention] == ["forward"] * 2 + ["backward"] * 2
    assert sum(op.flops for op in fused.within("blocks") if op.phase == "forward") == sum(
        op.flops for op in spelled.within("blocks") if op.phase == "forward"
    )


def test_edges_modules_and_uses_of_an_operator() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    captured = capture(model, torch.zeros(5, 3))
    ops = {(op.module, op.name): (at, op) for at, op in enumerate(captured.operators) if op.phase == "forward"}
    relu_at, relu = ops["1", "aten.relu.default"]
    first_at, first = ops["0", "aten.addmm.default"]
    second_at, second = ops["2", "aten.addmm.default"]
    assert [read.source for read in relu.reads()] == [first_at]
    assert [read.source for read in second.reads()][:2] == ["parameter:2.bias", relu_at]
    assert first.parameters == ("0.bias", "0.weight")
    assert (first.flops, first.read_bytes, first.written_bytes) == (2 * 5 * 3 * 4, 4 * (4 + 15 + 12), 4 * 20)
    assert (relu.saved_bytes, first.saved_bytes) == (4 * 20, 0)
    assert captured.operators[relu.last_use].phase == "backward"
    assert first.last_use == relu_at
    backward = [op for op in captured.operators if op.phase == "backward" and op.flops]
    assert {op.origin: op.module for op in backward} == {first_at: "0", second_at: "2"}
    assert second_at < captured.operators.index(backward[0])


def test_a_changed_tensor_is_read_from_the_operator_that_changed_it() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[0].add_(1)
            return y * 3

    captured = capture(Net(), torch.zeros(2, 2, requires_grad=True))
    names = [op.name for op in captured.operators if op.phase == "forward"]
    last = captured.operators[len(names) - 1]
    assert last.arguments[1] == 3
    assert [read.source for read in last.reads()] == [names.index("aten.add_.Tensor")]


def test_twelve_identical_blocks_are_one_group() -> None:
    captured = capture(GPT(12), words(), F.cross_entropy)
    assert captured.blocks == (tuple(f"blocks.{at}" for at in range(12)),)


def test_blocks_of_another_shape_or_frozen_are_apart() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, w), nn.ReLU(), nn.Linear(w, 4)) for w in (4, 4, 8, 8, 4)))
    model[4].requires_grad_(False)
    captured = capture(model, torch.zeros(2, 4))
    assert captured.blocks == (("0", "1"), ("2", "3"))


def test_nothing_is_changed_by_capturing() -> None:
    model = nn.Sequential(ResNet(10, 18, width=4), nn.Dropout(0.5))
    model[0].head_start = torch.ones(3)  # a tensor that is neither parameter nor buffer
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sample = images(32)
    digest = capture(model, sample, F.cross_entropy).digest()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    F.cross_entropy(model(sample[0]), sample[1]).backward()
    assert capture(model, sample, F.cross_entropy).digest() == digest, "gradients that are there change nothing"


def test_dropout_is_there_in_training_only() -> None:
    model = GPT()
    names = {mode: {op.name for op in capture(model.train(mode), words()[0]).operators} for mode in (True, False)}
    assert [mode for mode in names if "aten.bernoulli_.float" in names[mode]] == [True]


def test_parameters_are_named_once_and_told_from_buffers() -> None:
    model = nn.Sequential(GPT(tied=True), nn.BatchNorm1d(32))
    model[0].places.requires_grad_(False)
    captured = capture(model, words(), F.cross_entropy)
    by_name = {param.name: param for param in captured.parameters}
    assert captured.tied == (("0.head.weight", "0.tokens.weight"),)
    assert "0.head.weight" not in by_name
    assert not by_name["0.places.weight"].trainable
    assert by_name["0.tokens.weight"].trainable
    assert [b.name for b in captured.buffers] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    head = [op for op in captured.within("0.head") if op.phase == "forward"]
    assert {name for op in head for name in op.parameters} == {"0.tokens.weight"}


def test_dtype_and_device_are_kept() -> None:
    with torch.device("meta"):
        model, ids = GPT().bfloat16(), torch.zeros(2, 8, dtype=torch.long)
        model.places = nn.Embedding(8, 16).bfloat16()
    model.forward = lambda ids: model.head(model.blocks[0](model.tokens(ids)))  # type: ignore[method-assign]
    captured = capture(model, ids)
    assert {param.dtype for param in captured.parameters} == {"bfloat16"}
    assert next(op for op in captured.operators if op.name == "aten.mm.default").outputs[0].dtype == "bfloat16"
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_tensors_on_meta_are_taken_to_be_where_the_others_are() -> None:
    with torch.device("meta"):
        model = GPT()
    there = capture(GPT(), words(), F.cross_entropy)
    assert capture(model, words(), F.cross_entropy) == there
    assert capture(GPT(), tuple(part.to("meta") for part in words()), F.cross_entropy) == there


def test_a_sample_on_another_device_than_the_model_is_said() -> None:
    with FakeTensorMode():
        elsewhere = Arguments((torch.empty(2, 3, device="cuda"),), {})
    assert "The model is on cpu, the sample on cuda:0: put them on one device" in _advice(nn.Linear(3, 4), elsewhere)


def test_a_model_made_of_fake_tensors_is_captured() -> None:
    with FakeTensorMode():
        model, sample = GPT(), words()
    assert capture(model, sample, F.cross_entropy).digest() == capture(GPT(), words(), F.cross_entropy).digest()


def test_cast_under_autocast_is_seen() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(nn.Linear(3, 4), torch.zeros(2, 3))
    assert next(op for op in captured.operators if "addmm" in op.name).outputs[0].dtype == "bfloat16"


class Gated(nn.Module):
    """Asks for a value between its blocks, or in them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.gate = nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Halting(inside) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside and self.gate(x).sum() > 0:
            x = x + 1
        for block in self.blocks:
            x = block(x)
        return x


class Halting(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        while self.asks and bool(x.norm() > 1):
            x = x / 2
        return x


def test_values_asked_for_outside_of_blocks_leave_the_blocks_known() -> None:
    captured = capture(Gated(inside=False), torch.ones(2, 4))
    assert captured.level == "modules"
    assert captured.reasons == (
        "graph: aten._local_scalar_dense.default in the model asks for values, which are known only when it runs",
    )
    assert captured.blocks == (("blocks.0", "blocks.1", "blocks.2"),)
    assert any(op.name == "aten.addmm.default" for op in captured.within("blocks.1"))
    assert [op.name for op in captured.within("gate")] == ["Linear"]


def test_values_asked_for_inside_of_blocks_leave_modules() -> None:
    captured = capture(Gated(inside=True), torch.ones(2, 4))
    assert captured.level == "hooks"
    assert [reason.split(":")[0] for reason in captured.reasons] == ["graph", "modules"]
    assert "_local_scalar_dense.default in blocks.0" in captured.reasons[1]
    assert not any(op.name.startswith("aten.") for op in captured.operators)
    product = 2 * 2 * 4 * 8
    assert captured.flops == (3 * 2 + 3 * 4 - 1) * product, "the first layer has no gradient of its input"


def test_rows_chosen_by_a_mask_count_all() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[x[:, 0] > 0]
            return self.expert(chosen)

    captured = capture(Router(), torch.zeros(6, 4))
    assert captured.level == "hooks"
    assert captured.within("expert")[0].flops == 2 * 6 * 4 * 4


class Numeric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * float(np.abs(y.detach().numpy()).max())


def test_what_fake_tensors_cannot_do_is_done_on_dummies() -> None:
    captured = capture(Numeric(), torch.zeros(2, 4))
    assert captured.level == "hooks"
    assert captured.reasons[0].startswith("graph: RuntimeError: .numpy() is not supported")
    assert captured.within("layer")[0].flops == 2 * 2 * 4 * 4


def test_dummies_that_this_host_has_no_memory_for_are_an_error_and_not_tried() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Numeric(), nn.Linear(4, 2**40))
    with pytest.raises(ConfigError, match=r"\.numpy\(\) is not supported.*dummies would take 4\S+ GiB of memory, and"):
        capture(model, torch.zeros(2, 4))


class Grouped(nn.Module):
    """A product of one matrix for each group of rows, as mixtures of experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 6], dtype=torch.int32)
        return F.grouped_mm(x, self.experts, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_any_dtype_need_no_dummies(dtype: torch.dtype) -> None:
    model, rows = Grouped().to(dtype), torch.zeros(6, 8, dtype=dtype)
    captured = capture(model, rows)
    assert captured.level == "graph"
    products = [op for op in captured.operators if op.name == "aten._grouped_mm.default"]
    assert [op.outputs[0].shape for op in products if op.phase == "forward"] == [tuple(model(rows).shape)]
    assert (3, 8, 16) in [op.outputs[0].shape for op in products if op.phase == "backward"], "a gradient of each matrix"


@pytest.mark.parametrize(
    ("left", "right", "groups"),
    [((6, 8), (3, 8, 16), 3), ((8, 12), (12, 16), 3), ((3, 5, 8), (3, 8, 16), 0), ((3, 4, 8), (8, 16), 3)],
)
def test_shapes_of_grouped_products_are_those_of_torch(
    left: tuple[int, ...], right: tuple[int, ...], groups: int
) -> None:
    offs = torch.linspace(0, 16 if len(left) == 3 else left[-2], groups + 1)[1:].int() if groups else None
    factors = torch.randn(left), torch.randn(right)
    assert run_grouped_product(*factors, offs).shape == F.grouped_mm(*factors, offs=offs).shape


def test_recomputed_operators_belong_to_their_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]

    captured = capture(Net(), torch.zeros(2, 4))
    again = [op for op in captured.within("layers") if op.phase == "backward" and op.name == "aten.tanh.default"]
    assert [op.module for op in again] == ["layers.1"]


def test_lower_levels_tell_the_same_sums() -> None:
    levels: list[CapturedStep] = [
        capture(GPT(), words(), F.cross_entropy, level) for level in ("graph", "modules", "hooks")
    ]
    assert [len(captured.operators) for captured in levels] == sorted((len(c.operators) for c in levels), reverse=True)
    assert len({captured.flops for captured in levels}) == len({captured.saved_bytes for captured in levels}) == 1
    for captured in levels:
        for at, op in enumerate(captured.operators):
            assert op.last_use >= op.temporary_until >= at
            if op.origin is not None:
                assert captured.operators[op.origin].module == op.module
                assert captured.operators[op.origin].phase != "backward"
            for read in op.reads():
                if isinstance(read.source, int):
                    assert read.source < at
                    assert read.output < len(captured.operators[read.source].outputs)


def test_calls_of_a_module_are_told_apart() -> None:
    layer = nn.Linear(3, 3)
    captured = capture(nn.Sequential(layer, layer), torch.zeros(2, 3), level="hooks")
    assert [(op.name, op.module, op.call) for op in captured.operators if op.phase == "forward"] == [
        ("Linear", "0", 0),
        ("Linear", "0", 1),
    ]
    assert [op.call for op in captured.operators if op.phase == "backward" and op.flops] == [1, 0]


def test_recurrent_layers_count_their_products() -> None:
    captured = capture(nn.LSTM(4, 8, batch_first=True), torch.zeros(3, 5, 4))
    products = 2 * 3 * 5 * (4 + 8) * 4 * 8
    assert [captured.flops, sum(op.flops for op in captured.operators if op.phase == "forward")] == [
        3 * products,
        products,
    ]


def test_modules_that_torch_compiles_are_seen_through() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), backend="eager")
    captured = capture(model, torch.zeros(2, 3))
    assert captured.level == "graph"
    assert captured.within("_orig_mod.1")[0].name == "aten.relu.default"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripts_are_one_module() -> None:
    captured = capture(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 4))), nn.ReLU()), torch.zeros(2, 3))
    assert {op.module for op in captured.operators if op.phase == "forward"} == {"", "1"}


def test_keywords_are_a_sample_too() -> None:
    captured = capture(nn.Linear(3, 4), {"input": torch.zeros(2, 3)})
    assert any(op.name == "aten.addmm.default" for op in captured.operators)


def test_errors_say_what_to_hand_in() -> None:
    with pytest.raises(ConfigError, match=r"Linear on tensors with the shapes of the sample.*must have same"):
        capture(nn.Linear(3, 4), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match=r"takes a sample \(input, \.\.\., target\), found a Tensor"):
        capture(nn.Linear(3, 4), torch.zeros(2, 3), F.cross_entropy)
    with pytest.raises(ConfigError, match=r"levels graph, modules, hooks, not 'graf'. Did you mean"):
        capture(nn.Linear(3, 4), torch.zeros(2, 3), level="graf")  # type: ignore[arg-type]
    locked = nn.Linear(3, 4)
    locked.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"it failed: TypeError: cannot pickle '_thread.lock'"):
        capture(locked, torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"asked for level 'graph', the model allows 'hooks': graph: aten\."):
        capture(Gated(inside=True), torch.zeros(2, 4), level="graph")


DIGEST = """
import torch
from phalanx.auto.capture.step import capture
print(capture(torch.nn.TransformerEncoderLayer(4, 2, 8), torch.zeros(3, 4)).digest())
"""


def test_digest_is_the_same_in_another_process_and_not_for_another_width() -> None:
    same, wider = (capture(nn.TransformerEncoderLayer(4, 2, width), torch.zeros(3, 4)).digest() for width in (8, 9))
    there = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True).stdout.strip()
    assert there == same != wider
