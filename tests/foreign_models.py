"""Small models of transformers, torchvision and timm, made from configurations, and data for them. For ranks alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from benchmarks.published_models import VISION

ROWS, TOKENS, WORDS, CLASSES = 16, 6, 40, 3


@dataclass(frozen=True)
class Case:
    """One model and its data."""

    build: Callable[[], nn.Module]
    columns: Callable[[], dict[str, Tensor]]
    loss: Callable[..., Tensor] | None = None
    """None for a model that returns its loss."""

    collate: Callable[[list[Any]], Any] = default_collate


class Rows(Dataset[dict[str, Tensor]]):
    """Rows as dictionaries."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self._columns.items()}


def words(seed: int) -> Tensor:
    return torch.randint(1, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    lengths = torch.arange(ROWS) % (TOKENS - 2) + 2
    return (torch.arange(TOKENS) < lengths.unsqueeze(1)).long()


def classes() -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(3))


def images() -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def of_tokenizer() -> dict[str, Tensor]:
    """As a tokenizer orders its columns, which is not the order of BERT's parameters."""
    halves = (torch.arange(TOKENS) > 1).long().expand(ROWS, TOKENS)
    return {"input_ids": words(1), "token_type_ids": halves, "attention_mask": padding(), "labels": classes()}


def encoded(rows: list[Any]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(default_collate(rows))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, num_labels=CLASSES, **sizes, **dropout)
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=16, n_layer=1, n_head=2, **dropout)
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            max_position_embeddings=TOKENS,
            pad_token_id=0,
            **heads,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )
    )


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)  # type: ignore[no-any-return]


def timm_vit() -> nn.Module:
    import timm

    return timm.create_model(  # type: ignore[no-any-return]
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=CLASSES
    )


TRANSFORMERS = {
    "BERT": Case(bert, of_tokenizer, collate=encoded),
    "GPT-2": Case(gpt2, lambda: {"input_ids": words(1), "attention_mask": padding(), "labels": words(1)}),
    "T5": Case(t5, lambda: {"labels": words(2), "attention_mask": padding(), "input_ids": words(1)}),
    "Llama": Case(llama, lambda: {"attention_mask": padding(), "input_ids": words(1), "labels": words(1)}),
    "ViT": Case(vit, lambda: {"labels": classes(), "pixel_values": images()}),
}

PICTURES = {
    "torchvision ViT": Case(torchvision_vit, lambda: {"image": images(), "label": classes()}, nn.CrossEntropyLoss()),
    "timm ViT": Case(timm_vit, lambda: {"image": images(), "label": classes()}, nn.CrossEntropyLoss()),
}

CASES = TRANSFORMERS | (PICTURES if VISION.is_dir() else {})


def built(name: str) -> nn.Module:
    """Return a model in float64, the same on every rank."""
    torch.manual_seed(0)
    return CASES[name].build().double()
