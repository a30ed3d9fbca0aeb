"""`PUBLISHED`: models of torchvision and transformers in the sizes of their papers, without weights; their batches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VISION = Path(sys.prefix) / "vision"
"""Where `make setup` puts torchvision and timm."""

_libraries: list[Any] = []
"""A library's operators are there as long as it is."""


def import_foreign() -> None:
    """Import what the models are from; their own warnings are no concern of ours."""
    warnings.simplefilter("ignore")
    if VISION.is_dir():
        sys.path.append(str(VISION))
        _import_torchvision()
    import_transformers()


def import_transformers() -> None:
    """Import what models of text need; torchvision, where transformers finds it, takes as long again."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()


def _import_torchvision() -> None:
    """Import torchvision also where its operators, which no model here calls, are built for another torch."""
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
        import torchvision  # noqa: F401


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model as its authors published it, and one of the same code that trains in moments."""

    build: Callable[[bool], nn.Module]
    """Makes it, or the small one."""

    columns: Callable[[int, bool], Any]
    """The batch of so many samples, or one for the small model, as `px.auto_parallel` takes it."""

    rows: int
    """Samples of a batch on each device."""

    loss: Callable[..., Tensor] | None = None
    """None for a model that returns its loss."""


WORDS, CLASSES = 40, 3
"""Of small models: words of the vocabulary, and classes of images."""

_TOKENS, _PIXELS = 8, 32


def images(rows: int, small: bool) -> tuple[Tensor, Tensor]:
    """Return images and their classes; only those for small models are written."""
    if not small:
        return torch.empty(rows, 3, 224, 224), torch.empty(rows, dtype=torch.long)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(rows, 3, _PIXELS, _PIXELS, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(CLASSES, (rows,), generator=generator)


def sentences(tokens: int, *, attends: bool = False) -> Callable[[int, bool], dict[str, Tensor]]:
    """Return what makes a batch of sequences of so many tokens, with labels; only those for small models are written.

    Args:
        tokens: Of a sequence.
        attends: Whether sequences differ in length, which a mask tells.
    """

    def columns(rows: int, small: bool) -> dict[str, Tensor]:
        shape = (rows, _TOKENS if small else tokens)
        ids, mask = torch.empty(shape, dtype=torch.long), torch.empty(shape, dtype=torch.long)
        if small:
            ids.random_(1, WORDS, generator=torch.Generator().manual_seed(1))
            lengths = torch.arange(rows) % (_TOKENS - 2) + 3
            mask.copy_(torch.arange(_TOKENS) < lengths.unsqueeze(1))
        return {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if attends else {})

    return columns


def resnet50(small: bool) -> nn.Module:
    """Return ResNet-50 (arXiv:1512.03385)."""
    from torchvision.models.resnet import Bottleneck, ResNet, resnet50

    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=CLASSES, width_per_group=4) if small else resnet50()


def vit_b_16(small: bool) -> nn.Module:
    """Return ViT-B/16 (arXiv:2010.11929)."""
    from torchvision.models import VisionTransformer, vit_b_16

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 32, "num_classes": CLASSES}
    return VisionTransformer(_PIXELS, 8, **sizes) if small else vit_b_16()


def swin_t(small: bool) -> nn.Module:
    """Return Swin-T (arXiv:2103.14030)."""
    from torchvision.models import SwinTransformer, swin_t

    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, 2], "num_classes": CLASSES}
    return SwinTransformer([4, 4], stochastic_depth_prob=0.0, **sizes) if small else swin_t()


def convnext_t(small: bool) -> nn.Module:
    """Return ConvNeXt-T (arXiv:2201.03545)."""
    from torchvision.models import ConvNeXt, convnext_tiny
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES) if small else convnext_tiny()


def bert_base(small: bool) -> nn.Module:
    """Return BERT-base (arXiv:1810.04805), which predicts masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    words = {"vocab_size": WORDS, "max_position_embeddings": _TOKENS}
    return BertForMaskedLM(BertConfig(**sizes, **dropout, **words) if small else BertConfig())


def gpt2(small: bool) -> nn.Module:
    """Return the smallest GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": _TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout) if small else GPT2Config())


_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": _TOKENS,
}


def llama3_8b(small: bool) -> nn.Module:
    """Return Llama 3 of 8B parameters (arXiv:2407.21783)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    return LlamaForCausalLM(LlamaConfig(**(_DECODER if small else sizes | heads)))


def t5_base(small: bool) -> nn.Module:
    """Return T5-base (arXiv:1910.10683)."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    few = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
    few["dropout_rate"] = 0.0
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **(few if small else sizes)))


def mixtral_8x7b(small: bool) -> nn.Module:
    """Return Mixtral of 8 experts (arXiv:2401.04088)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_local_experts=4, **_DECODER) if small else MixtralConfig()
    if small:
        config._experts_implementation = "eager"  # others compute in no float64
    return MixtralForCausalLM(config)


_TEXT = sentences(512, attends=True)

PUBLISHED = {
    "ResNet-50": PublishedModel(resnet50, images, 64, F.cross_entropy),
    "ViT-B/16": PublishedModel(vit_b_16, images, 64, F.cross_entropy),
    "Swin-T": PublishedModel(swin_t, images, 64, F.cross_entropy),
    "ConvNeXt-T": PublishedModel(convnext_t, images, 64, F.cross_entropy),
    "BERT-base": PublishedModel(bert_base, _TEXT, 32),
    "GPT-2": PublishedModel(gpt2, sentences(1024), 8),
    "Llama-3-8B": PublishedModel(llama3_8b, sentences(4096), 1),
    "T5-base": PublishedModel(t5_base, _TEXT, 16),
    "Mixtral-8x7B": PublishedModel(mixtral_8x7b, sentences(4096), 1),
}
"""By name. Batches are of a size that is usual for training on GPUs."""


def build(name: str) -> nn.Module:
    """Return a model that holds no memory."""
    with torch.device("meta"):
        return PUBLISHED[name].build(False)


def build_small(name: str) -> nn.Module:
    """Return a small model in float64, the same in every process."""
    torch.manual_seed(0)
    return PUBLISHED[name].build(True).double()


def batch(name: str, devices: int) -> Any:
    """Return a global batch for so many devices, of which nothing is written: its memory is never there."""
    model = PUBLISHED[name]
    return model.columns(model.rows * devices, False)
