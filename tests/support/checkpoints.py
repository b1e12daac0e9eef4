"""Small checkpoints that two ranks would write, made in one process; and what they hold."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.file_system import Place
from lightning_par.checkpoint.file_writer import FileSave
from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.part import make_part
from lightning_par.checkpoint.pieces import Piece
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.save_coordinator import CheckpointSaver
from lightning_par.checkpoint.writer import FolderSave, SaveMetadata
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

WORLD = 2


def make_values(seed: int) -> dict[str, Tensor]:
    """Weights of several types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "table": torch.randn(7, 5, generator=generator),
        "bias": torch.randn(5, generator=generator, dtype=torch.float64),
        "half": torch.randn(3, 2, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "empty": torch.empty(0, 3),
    }


def pieces_of(values: dict[str, Tensor], rank: int) -> list[Piece]:
    """Of the table the rows that a rank holds, of the rest what one of them writes."""
    found = []
    for number, (name, value) in enumerate(values.items()):
        if name == "table":
            low, high = (0, 4) if rank == 0 else (4, 7)
            box = Box(name, (low, 0), (high - low, 5))
            found.append(Piece(box, (7, 5), value[low:high]))
        elif number % WORLD == rank:
            box = Box(name, (0,) * value.ndim, tuple(value.shape))
            found.append(Piece(box, tuple(value.shape), value))
    return found


def part_of(
    seed: int, rank: int, world: int = WORLD, state: Any = None, *, as_file: bool = False
) -> Any:
    """What one rank would write."""
    values = make_values(seed)
    if world == 1:
        whole = [Box(n, (0,) * v.ndim, tuple(v.shape)) for n, v in values.items()]
        pieces = [Piece(box, box.shape, values[box.name]) for box in whole]
    else:
        pieces = pieces_of(values, rank)
    moments = [
        Piece(Box(f"0/{p.box.name}/exp_avg", p.box.offset, p.box.shape), p.global_shape, -p.values)
        for p in pieces
    ]
    state = {"epoch": seed, "tensor": torch.full((3,), seed), **(state or {})}
    groups = [[{"lr": 0.1, "params": list(values)}]]
    return make_part(
        rank,
        world,
        step=seed,
        weights=pieces,
        optimizer=moments,
        state=state,
        groups=groups,
        dumped={"state_dict": None, "optimizer_states": [], **state} if as_file else None,
    )


def write_together(path: Any, seed: int, state: Any, *, as_file: bool) -> Any:
    """Write a checkpoint of two ranks."""
    metadata = SaveMetadata(
        manifest=Manifest(world_size=WORLD, step=seed, epoch=seed),
        aliases={"tied": "table"},
        place=list(make_values(seed)).index,
    )
    made = FileSave if as_file else FolderSave
    parts = [part_of(seed, rank, state=state, as_file=as_file) for rank in range(WORLD)]
    saves = [made(path, part, metadata) for part in parts]
    starts = saves[0].prepare([save.outline() for save in saves])
    saves[0].commit([save.write(starts) for save in saves])
    return path


def write_folder(path: Any, seed: int, state: Any = None) -> Any:
    """Write a checkpoint of two ranks that is a folder."""
    return write_together(path, seed, state, as_file=False)


def write_file(path: Path, seed: int, state: Any = None) -> Path:
    """Write a checkpoint of two ranks that is one file."""
    return write_together(path, seed, state, as_file=True)


WRITERS = {"folder": write_folder, "file": write_file}
"""Form of a checkpoint -> function that writes one of two ranks."""


def save_alone(path: Place, seed: int, *, as_file: bool = False) -> None:
    """Save as the only rank."""
    order = SaveMetadata(
        manifest=Manifest(world_size=1, step=seed), aliases={}, place=list(make_values(seed)).index
    )
    CheckpointSaver().save(path, part_of(seed, 0, 1, as_file=as_file), order)


def read_folder(path: Place) -> dict[str, Tensor]:
    """Everything in a checkpoint that is a tensor, and the seed that made it."""
    reader = CheckpointReader(path)
    (optimizer,) = reader.optimizers()
    states = {f"{n}/exp_avg": s["exp_avg"].read() for n, s in optimizer.states.items()}
    return {**dict(reader.weights()), **states, "state": reader.state(0)["tensor"]}


def expected(seed: int) -> dict[str, Tensor]:
    """What `read_folder` gives."""
    values = make_values(seed)
    moments = {f"{name}/exp_avg": -value for name, value in values.items()}
    return {**values, **moments, "state": torch.full((3,), seed)}


def holds(path: Place, seed: int) -> bool:
    """Whether a checkpoint holds exactly what a seed makes."""
    found, wanted = read_folder(path), expected(seed)
    found.pop("tied", None)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[n], v) and found[n].dtype == v.dtype for n, v in wanted.items()
    )


def find_problems(path: Place) -> list[str]:
    """Verify every file of a checkpoint: one message per missing or damaged one."""
    try:
        reader = CheckpointReader(path)
    except CheckpointError as error:
        return [str(error)]
    return reader.problems(sorted(reader.manifest.files))
