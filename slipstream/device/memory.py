"""Arithmetic of a rank's memory that every device shares."""

import torch

from slipstream.models.llama import CacheShape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def page_bytes(cache: CacheShape, page_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one page of `page_size` tokens in all layers; 0 for a rank without heads."""
    return cache.layers * page_size * 2 * cache.heads * cache.head_dim * dtype.itemsize
