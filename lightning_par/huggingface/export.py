"""Checkpoint folders as folders that ``from_pretrained`` reads."""

import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_par.checkpoint.export import OWN_STATE, verify_files
from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.storage import replacing, write_json
from lightning_par.checkpoint.tensor_files import StoredTensor
from lightning_par.errors import CheckpointError

__all__ = ["MODEL_STATE", "export_folder"]

MODEL_STATE = "huggingface"
"""Key under which a checkpoint says which Hugging Face model it holds."""
_WEIGHTS = "model.safetensors"


def export_folder(reader: CheckpointReader, path: Path, *, max_shard_bytes: int) -> list[str]:
    """Write the weights of a Hugging Face model and its configuration, as ``save_pretrained`` does.

    In memory are the weights of one file.

    Args:
        reader: Reader of the checkpoint.
        path: A folder; what is there stays until the new one is whole.
        max_shard_bytes: A file of weights ends before it grows larger.

    Returns:
        The names of the weights.

    Raises:
        CheckpointError: The checkpoint holds no such model, or not under the names that
            ``from_pretrained`` looks for, or a file is damaged.
    """
    verify_files(reader, ["weights", "state"])
    found = reader.state(0)[OWN_STATE].get(MODEL_STATE)
    if found is None:
        raise CheckpointError(
            "LP509",
            f"{reader.path} does not hold exactly one Hugging Face model. Use --out "
            "NAME.safetensors to export its weights.",
        )
    dot = f"{found['prefix']}." if found["prefix"] else ""
    weights = reader.weights()
    # Names only: iterating the mapping reads no tensor.
    names = [n for n in weights if n.startswith(dot) and n not in reader.index.aliases]
    values = {n.removeprefix(dot): weights.find(n) for n in names}
    stored = {n: v for n, v in values.items() if isinstance(v, StoredTensor)}
    config = json.loads(found["config"])
    # The dtype of the weights as stored, not that which the model was configured with: precision
    # plugins may have changed it.
    floating = (str(v.dtype) for v in stored.values() if v.dtype.is_floating_point)
    config["dtype"] = next(floating, "torch.float32").removeprefix("torch.")
    model = _on_meta(config)
    _check_names(model, stored, {n.removeprefix(dot) for n in reader.index.aliases}, found)
    moves = sum(v.nbytes for v in stored.values())
    # The folder appears at once, with all of its files.
    with replacing(path) as partial, counted("read", f"exporting {path.name}", moves):
        partial.mkdir()
        files = _write_files(partial, _as_saved(model, stored), max_shard_bytes)
        write_json(partial / "config.json", config)
    return [name for file in files.values() for name in file]


def _on_meta(config: Mapping[str, Any]) -> Any:
    """Return the model of a configuration, without memory."""
    import transformers

    # `describe_model` wrote exactly one.
    (architecture,) = config["architectures"]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise CheckpointError(
            "LP509",
            f"the installed transformers has no class {architecture}, so the model cannot be "
            "exported for from_pretrained. Use --out NAME.safetensors --below MODULE to export "
            "the weights, and save the configuration with config.save_pretrained.",
        )
    # For names, shapes and conversions; nothing of the weights is needed for those.
    with torch.device("meta"):
        return kind(kind.config_class.from_dict(dict(config)))


def _check_names(
    model: Any,
    stored: Mapping[str, StoredTensor],
    aliases: Container[str],
    found: Mapping[str, Any],
) -> None:
    """Refuse weights that ``from_pretrained`` would leave as they were drawn, or could not load.

    Args:
        model: The model on meta, as ``from_pretrained`` makes it.
        stored: The weights, by their names in the model.
        aliases: Names of tied weights that are stored under another one.
        found: What the checkpoint says of its model.
    """
    # Buffers count, too, if they are in the state dict.
    wanted = {name: t.shape for name, t in model.state_dict().items() if name not in aliases}
    missing = [name for name in wanted if name not in stored]
    other = [name for name in stored if name not in wanted]
    if missing or other:
        kind, where = type(model).__name__, found["prefix"].removesuffix(".base_model.model")
        texts = [
            f"{len(names)} weights {rule} ({names[0]}{', ...' if len(names) > 1 else ''})"
            for names, rule in ((missing, "are missing"), (other, "would be left out"))
            if names
        ]
        adapted = any(".lora_" in name for name in other)
        cure = f"module.{where}.merge_and_unload()" if adapted else f"module.{found['prefix']}"
        raise CheckpointError(
            "LP509",
            f"from_pretrained of {kind} cannot read this model: {'; '.join(texts)}. "
            + (
                "These weights belong to adapters, which have to be merged into the model first. "
                if adapted
                else ""
            )
            + (
                "Use --out NAME.safetensors to export the weights unchanged; or call module = "
                "lightning_par.load_from_checkpoint(YourModule, path) and "
                f"{cure}.save_pretrained(folder) in one process."
            ),
        )
    shapes = [n for n, shape in wanted.items() if shape != stored[n].shape]
    if shapes:
        name = shapes[0]
        raise CheckpointError(
            "LP509",
            f"from_pretrained cannot read this model: {name} has the shape "
            f"{tuple(stored[name].shape)}, but the configuration of the model gives "
            f"{tuple(wanted[name])}. Use --out NAME.safetensors to export the weights, or correct "
            "module.config before you save.",
        )


def _as_saved(model: Any, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Give the weights under the names that folders have; those of a block are read together."""
    from transformers.core_model_loading import revert_weight_conversion

    groups: dict[str, list[str]] = {}
    for name in stored:
        # "model.layers.0.": of a block whose experts are stored one by one, all parts are needed
        # at once. What is in no block is read alone.
        block = re.match(r".*?\.\d+\.", name)
        groups.setdefault(block.group() if block else name, []).append(name)
    for members in groups.values():
        # E.g. one tensor of all experts in memory becomes one per expert in the file.
        values = revert_weight_conversion(model, {name: stored[name].read() for name in members})
        yield from ((name, value.contiguous()) for name, value in values.items())


def _write_files(
    folder: Path, values: Iterator[tuple[str, Tensor]], max_bytes: int
) -> dict[str, list[str]]:
    """Write files of weights, and an index if there are several; return the names in each file."""
    written: dict[str, list[str]] = {}
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        # The final names hold the number of files, which is not known yet.
        name = f"part-{len(written)}"
        save_file(held, folder / name, metadata={"format": "pt"})
        written[name] = list(held)
        held.clear()

    for name, value in values:
        total += value.nbytes
        # A tensor that is larger than a file may be gets a file of its own.
        if held and value.nbytes + sum(v.nbytes for v in held.values()) > max_bytes:
            flush()
        held[name] = value
    # Never empty: `_check_names` has found weights.
    flush()
    count = len(written)
    final: dict[str, list[str]] = {}
    for number, (name, members) in enumerate(written.items(), 1):
        better = _WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        (folder / name).rename(folder / better)
        final[better] = members
    if count > 1:
        weight_map = {name: file for file, members in final.items() for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{_WEIGHTS}.index.json", index)
    return final
