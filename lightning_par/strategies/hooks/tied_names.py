"""Under which names a checkpoint stores the entries of tied weights: one for equal entries.

A hook on a checkpoint may remove one name of a tied weight, or give it another value. Which names
are left and which are equal is what all ranks say together: pipeline stages hold different ones.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import local_box, local_part
from lightning_par.errors import describe

__all__ = ["stored_names"]


@torch.no_grad()
def stored_names(
    tied: Iterable[Sequence[str]], state: Mapping[str, Any], module: nn.Module
) -> dict[str, str]:
    """Return every name of a tied weight in a state dict -> the name under which it is stored.

    Args:
        tied: The names of each weight that has several, in order.
        state: Of this rank's part, as hooks have left it.
        module: The module on this rank.

    **Communicates**: if there are tied weights, a text for each name, between all ranks.
    """
    groups = [names for names in tied if len(names) > 1]
    if not groups:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False))
    own: dict[str, str] = {}
    for names in groups:
        values = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
        weights = {_memory(named[name]) for name in names if name in named}
        # Nobody has replaced them, as in most saves; else all are compared by their contents.
        is_kept = all(_memory(value) in weights for value in values.values())
        own |= {name: names[0] if is_kept else _content(name, v) for name, v in values.items()}
    told = [own]
    if dist.is_initialized():
        told = [own] * dist.get_world_size()
        dist.all_gather_object(told, own)
    found: dict[str, str] = {}
    for names in groups:
        first: dict[frozenset[str], str] = {}
        for name in names:
            contents = frozenset(of_rank[name] for of_rank in told if name in of_rank)
            if contents:
                found[name] = first.setdefault(contents, name)
    return found


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    part = local_part(tensor)
    return part.data_ptr(), part.dtype, part.shape, part.stride()


def _content(name: str, value: Tensor) -> str:
    """Describe what a rank stores of a tensor: equal texts, equal contents."""
    try:
        part = local_part(value).cpu().contiguous()
        bytes_of: Any = part.flatten().view(torch.uint8).numpy()
        return f"{local_box('', value)} of {value.shape}, {value.dtype}: {zlib.crc32(bytes_of)}"
    except Exception as error:  # the other ranks wait; it is told where the tensor is stored
        return f"{name}: {describe(error)}"
