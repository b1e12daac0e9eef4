"""Weights of ``save_pretrained`` folders under the names that the model has in memory.

A folder may name weights otherwise than the model does, and hold in many tensors what the model has
in one (the experts of a Mixtral). transformers knows what belongs where; here, that knowledge is
turned into an index, so that a rank still reads the part that it holds and nothing else.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_par.checkpoint.index import Chunk, TensorEntry
from lightning_par.checkpoint.tensor_files import StoredTensor, StoredTensors
from lightning_par.errors import CheckpointError
from lightning_par.huggingface.lookup import find_model
from lightning_par.upstream.transformers import ignored_keys

__all__ = ["adapt_weights"]

_Parts = dict[str, list[StoredTensor]]
"""Pattern of a source name -> the tensors that match it, in order."""


def adapt_weights(module: nn.Module, stored: StoredTensors, names: Iterable[str]) -> StoredTensors:
    """Return weights under the names that the Hugging Face model inside `module` gives them.

    Args:
        module: A LightningModule; it may hold a part of the model only.
        stored: Weights as they were found.
        names: All keys of the whole module's state dict.

    Returns:
        The same weights, unread. Where `module` has no such model, or `stored` fits as it is,
        `stored` itself.

    Raises:
        CheckpointError: Weights would have to be computed, and not only put together.
    """
    found = find_model(module)
    # All names known: written by this package, or by a model of these very names.
    if found is None or set(stored) <= set(names):
        return stored
    prefix, model = found
    dot = f"{prefix}." if prefix else ""
    # `rename_source_key` asks for a mapping of names, and looks only at the keys.
    known = {name.removeprefix(dot): True for name in names if name.startswith(dot)}
    parts = _sort_parts(model, stored, known)
    entries: dict[str, Any] = {}
    for name, (converter, sources) in parts.items():
        entries[dot + name] = (
            next(iter(sources.values()))[0]
            if converter is None
            else _join(name, converter, sources)
        )
    return StoredTensors(entries)


def _sort_parts(
    model: Any, stored: StoredTensors, known: dict[str, bool]
) -> dict[str, tuple[Any, _Parts]]:
    """Say for every name in the model which stored tensors it is made of, and how."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        rename_source_key,
        WeightConverter,
        WeightRenaming,
    )

    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    ignored = [re.compile(p) for p in ignored_keys(model)]
    found: dict[str, tuple[Any, _Parts]] = {}
    # In the order of the experts' numbers: they are stacked as they come.
    for key in sorted(stored, key=_natural):
        base = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, base, known)
        # As `from_pretrained` does: an old buffer of positions, say.
        if name not in known and any(p.search(name) for p in ignored):
            continue
        converter = None if pattern is None else by_pattern[pattern]
        sources = found.setdefault(name, (converter, {}))[1]
        sources.setdefault(pattern or key, []).append(stored.find(key))
    return found


def _natural(key: str) -> list[tuple[int, str]]:
    """Sort numbers in names by their value: expert 10 comes after expert 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in key.split(".")]


def _join(name: str, converter: Any, sources: _Parts) -> StoredTensor:
    """Return a tensor that is put together out of stored ones."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = list(converter.operations)
    ordered = [sources[p] for p in converter.source_patterns if p in sources]
    merged = [tensor for tensors in ordered for tensor in tensors]
    # Stacked along a new first dim: a chunk per expert, each of its own file and key.
    if operations and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0:
        merged = [_stack(tensors) for tensors in ordered]
        # What is left at the end would be arithmetic, which boxes of files cannot express.
        operations = operations[1:]
    # gate and up, one behind the other in one tensor.
    if operations and isinstance(operations[0], Concatenate):
        merged = [_concatenate(merged, operations[0].dim)]
        operations = operations[1:]
    if operations or len(merged) != 1 or len(converter.target_patterns) != 1:
        kinds = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise CheckpointError(
            "LP510",
            f"the weight {name} cannot be loaded: transformers computes it from the tensors "
            f"{', '.join(sources)} of the checkpoint by {kinds}, but here each rank reads only its "
            "own part of a weight from the files. Build the model with from_pretrained in the "
            "LightningModule's constructor instead, and train without ckpt_path.",
        )
    return merged[0]


def _stack(tensors: Sequence[StoredTensor]) -> StoredTensor:
    entry = tensors[0].entry
    chunks = tuple(
        # `TensorFiles` adds the dim when it reads such a chunk.
        Chunk(chunk.file, chunk.key, (place, *chunk.offset), (1, *chunk.shape))
        for place, tensor in enumerate(tensors)
        for chunk in tensor.entry.chunks
    )
    return StoredTensor(
        tensors[0].files, TensorEntry(entry.dtype, (len(tensors), *entry.shape), chunks)
    )


def _concatenate(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    chunks: list[Chunk] = []
    total = 0
    for tensor in tensors:
        for chunk in tensor.entry.chunks:
            offset = list(chunk.offset)
            offset[dim] += total
            chunks.append(replace(chunk, offset=tuple(offset)))
        total += tensor.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = total
    entry = TensorEntry(tensors[0].dtype, tuple(shape), tuple(chunks))
    return StoredTensor(tensors[0].files, entry)
