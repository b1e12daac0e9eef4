"""Small data for tests of the reference models."""

from typing import Any

import torch
from torch.utils.data import DataLoader


def byte_loader(size: int = 8, tokens: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    """Random bytes as ``{"input_ids", "labels"}``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (size, tokens + 1), generator=generator)
    samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    return DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]
