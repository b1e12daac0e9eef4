"""What one rank writes of a checkpoint: its shards, and the rest of its state as JSON types."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_par.checkpoint.index import file_name
from lightning_par.checkpoint.json_encoding import Encoder
from lightning_par.checkpoint.pieces import Piece
from lightning_par.checkpoint.storage import DTYPES, how_to_store, tensors_length
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

__all__ = ["Part", "Plain", "make_part"]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What rank 0 writes for a rank into a checkpoint that is one file.

    Attributes:
        values: As `Part.values`, not encoded.
        groups: As `Part.groups`, not encoded.
        state_names: Names of optimizer states (``exp_avg``), in the optimizers' order.
        state: `Part.state` as JSON text.
        room: Length of the record for `Part.tensors`; 0: there are none.
    """

    values: Mapping[str, Any]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    state_names: Sequence[str]
    state: bytes
    room: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank writes of a checkpoint; made by `make_part`.

    Attributes:
        rank: Global rank.
        world: Number of ranks.
        step: Number of optimizer steps of the weights.
        weights: Local shards of the weights.
        optimizer: Local shards of the optimizer states, named ``"0/<weight>/exp_avg"``.
        state: The rest of the state by the Trainer's keys, encoded as JSON types.
        tensors: Key -> tensor, of all tensors inside `state`, `values` and `groups`.
        values: Entries of the state dicts that are no tensors, encoded; see `Index`.
        groups: Per optimizer its parameter groups: encoded options, and FQNs.
        dumped: For one file: what the Trainer dumped; of its state dict and its optimizers only
            that they are there. Only that of rank 0 is used.
        plain: For one file: what rank 0 writes for this rank; None: the checkpoint is a folder.
        error: Why this rank has nothing to write; None: it has.
    """

    rank: int
    world: int
    step: int = 0
    weights: Sequence[Piece] = ()
    optimizer: Sequence[Piece] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    dumped: Mapping[str, Any] = field(default_factory=dict)
    plain: Plain | None = None
    error: str | None = None

    @property
    def pieces(self) -> dict[str, Sequence[Piece]]:
        """Local shards by their kind."""
        return {"weights": self.weights, "optimizer": self.optimizer}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        shards = sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)
        return shards + sum(tensor.nbytes for tensor in self.tensors.values())

    def only(self, boxes: Container[Box]) -> "Part":
        """Return a copy with only some of the shards.

        Args:
            boxes: Boxes of the shards that this rank writes.
        """

        def chosen(pieces: Sequence[Piece]) -> list[Piece]:
            return [p for p in pieces if p.box in boxes]

        return replace(self, weights=chosen(self.weights), optimizer=chosen(self.optimizer))

    def on_cpu(self) -> "Part":
        """Return a copy with its weights and optimizer states copied to the CPU.

        Training may then go on while a background save writes the copy.
        """

        def copied(pieces: Sequence[Piece]) -> list[Piece]:
            return [replace(p, values=p.values.detach().to("cpu", copy=True)) for p in pieces]

        return replace(self, weights=copied(self.weights), optimizer=copied(self.optimizer))


def make_part(
    rank: int,
    world: int,
    *,
    step: int = 0,
    weights: Sequence[Piece],
    optimizer: Sequence[Piece] = (),
    state: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[Mapping[str, Any]]] = (),
    dumped: Mapping[str, Any] | None = None,
) -> Part:
    """Make the part of one rank: encode its state, check its dtypes.

    Args:
        rank: Global rank.
        world: Number of ranks.
        step: Number of optimizer steps of the weights.
        weights: Local shards of the weights.
        optimizer: Local shards of the optimizer states, named ``"0/<weight>/exp_avg"``.
        state: The rest of the state by the Trainer's keys, not encoded.
        values: Entries of the state dicts that are no tensors, named as in `Index.values`.
        groups: Per optimizer its parameter groups: options, and FQNs under ``"params"``.
        dumped: For one file: what the Trainer dumped, see `Part.dumped`.

    Raises:
        CheckpointError: A tensor has a dtype that safetensors lacks, or a value cannot be encoded;
            names it.
    """
    # Here and not while writing: now every rank can still refuse before a file is made.
    for piece in (*weights, *optimizer):
        if piece.values.dtype not in DTYPES.values():
            raise CheckpointError(
                "LP505",
                f"the tensor {piece.box.name} has the dtype {piece.values.dtype}, which a "
                f"safetensors file cannot hold. {how_to_store(piece.values)}",
            )
    # One encoder for all three, as keys of tensors are numbers within one file.
    encoder = Encoder(file_name("state", rank, world))
    encode = encoder.encode
    part = Part(
        rank=rank,
        world=world,
        step=step,
        weights=weights,
        optimizer=optimizer,
        state={key: encode(value, key) for key, value in (state or {}).items()},
        values={key: encode(value, key) for key, value in (values or {}).items()},
        groups=[
            [{k: encode(v, f"param_groups.{k}") for k, v in g.items()} for g in o] for o in groups
        ],
        tensors=encoder.tensors,
    )
    # A folder needs no more: rank 0 never sees the values of others but in JSON.
    if dumped is None:
        return part
    plain = Plain(
        values=values or {},
        groups=groups,
        # All states, as of some of them another rank may be the writer.
        state_names=list(dict.fromkeys(p.box.name.rpartition("/")[2] for p in optimizer)),
        state=json.dumps(part.state, allow_nan=False).encode(),
        # Rank 0 lays the file out before this rank writes, so the length has to be known exactly.
        room=tensors_length(part.tensors) if part.tensors else 0,
    )
    return replace(part, dumped=dumped, plain=plain)
