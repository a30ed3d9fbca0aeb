"""Bags of ids as one pooled row each: `EmbeddingBag`, and TorchRec's `EmbeddingBagCollection` over tables.

In: ids in any form that torch's `EmbeddingBag` takes, or features by name. Out: rows of shape (bags, dim), summed,
averaged or the maximum, with gradients for the table. Start with `embedding_bag`; `bags` checks what comes in.
"""
