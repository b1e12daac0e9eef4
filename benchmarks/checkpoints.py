"""Time to save and to load a checkpoint on two ranks (dp 2, zero 3, or with --tensor tp 2), as one
file and as a folder, against torch.distributed.checkpoint and against Lightning's way, one file
written by rank 0; and the memory that a save takes.

All of it: weights and AdamW's states, on the disk (fsync), ours with checksums written and
verified. A step is one save, or one load.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _gpt import BenchModule, loader
from _paired import add_arguments, Arguments, compare, launch, read_arguments, Turn
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.strategies import Hybrid3DStrategy

CONFIG = GPTConfig(
    vocab_size=8192, num_layers=8, model_dim=512, num_heads=8, num_kv_heads=8, tied_head=False
)
"""34 million parameters: 410 MB with the states of AdamW, in float32."""


def trained(tensor: int, **options: Any) -> pl.Trainer:
    """A Trainer after one step."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": 1}
    # What is saved is the parallel form, as in the middle of a run.
    more = {"zero_stage": 3 if tensor == 1 else 0, "gather_after_run": False, **options}
    strategy = Hybrid3DStrategy(**sizes, **more)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BenchModule(CONFIG), loader(1, vocab=CONFIG.vocab_size))
    return trainer


def flat_state(trainer: Any) -> dict[str, Any]:
    """What a rank holds, as DCP takes it."""
    states, module = trainer.strategy.parallel_model.states, trainer.lightning_module
    optimizer = states.local_optimizer(module, trainer.optimizers[0])
    moments = {
        f"optimizer.{name}.{key}": value
        for name, entry in optimizer["state"].items()
        for key, value in entry.items()
    }
    return {**{f"model.{n}": p.detach() for n, p in module.named_parameters()}, **moments}


class Contenders:
    """Every way to save and to load, each with a folder of its own.

    Args:
        trainer: Whose state; it saves one file.
        into_folder: One that saves a folder.
        background: One that saves one file in the background.
        folder: Where to.
    """

    def __init__(self, trainer: Any, into_folder: Any, background: Any, folder: Path) -> None:
        self.trainer, self.into_folder, self.background = trainer, into_folder, background
        self.folder = folder
        self.state = flat_state(trainer)

    def save_dcp(self) -> None:
        """torch.distributed.checkpoint, after the last one is removed."""
        path = self.folder / "dcp"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        dcp.save(self.state, checkpoint_id=path)

    def save_ours(self) -> None:
        """`Trainer.save_checkpoint` of a folder, over the last one."""
        self.into_folder.save_checkpoint(self.folder / "ours.ckpt")

    def save_file(self) -> None:
        """`Trainer.save_checkpoint` of one file, over the last one."""
        self.trainer.save_checkpoint(self.folder / "file.ckpt")

    def stall_of_background(self) -> None:
        """How long the training waits with `async_save=True`."""
        self.background.save_checkpoint(self.folder / "background.ckpt")

    def gathered(self) -> dict[str, Any]:
        """Everything on rank 0."""
        states, module = self.trainer.strategy.parallel_model.states, self.trainer.lightning_module
        return {
            "state_dict": states.gather_state(module.state_dict()),
            "optimizer_states": [states.gather_optimizer(module, self.trainer.optimizers[0])],
        }

    def save_lightning(self) -> None:
        """What Lightning does with a gathered checkpoint; no fsync."""
        checkpoint = self.gathered()
        if dist.get_rank() == 0:
            TorchCheckpointIO().save_checkpoint(checkpoint, self.folder / "lightning.ckpt")

    def load_dcp(self) -> None:
        """Into the tensors in place."""
        dcp.load(self.state, checkpoint_id=self.folder / "dcp")

    def load_ours(self) -> None:
        """Every file verified first."""
        strategy = self.trainer.strategy
        self.load(strategy.load_checkpoint(self.folder / "ours.ckpt"))

    def load_file(self) -> None:
        """Every part verified first."""
        self.load(self.trainer.strategy.load_checkpoint(self.folder / "file.ckpt"))

    def load_lightning(self) -> None:
        """Each rank reads the whole file and takes its part."""
        path = self.folder / "lightning.ckpt"
        self.load(TorchCheckpointIO().load_checkpoint(path, map_location="cpu"))

    def load(self, checkpoint: Any) -> None:
        """Into model and optimizer."""
        self.trainer.strategy.load_model_state_dict(checkpoint)
        self.trainer.strategy.load_optimizer_state_dict(checkpoint)


def in_turns(work: Callable[[], None], arguments: Arguments) -> Callable[[Turn], None]:
    """A contender whose step is one call of `work`."""

    def run(turn: Turn) -> None:
        for step in range(arguments.total_steps):
            turn.next()
            if step < arguments.total_steps - 1:  # the last one only ends the last block
                work()

    return run


def growth(work: Callable[[], None]) -> float:
    """MiB by which the resident memory of this process grows at most during `work`."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"{field}:")]
        return int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, see proc(5)
    before = resident("VmRSS")
    work()
    return round((resident("VmHWM") - before) / 1024, 1)


def measure(arguments: Arguments, root: Path, tensor: int) -> None:
    """Run on every rank."""
    pl.seed_everything(1, verbose=False)
    box = [tempfile.mkdtemp(dir=root) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    made = Contenders(
        trained(tensor, checkpoint_format="file"),
        trained(tensor, checkpoint_format="folder"),
        trained(tensor, checkpoint_format="file", async_save=True),
        folder,
    )
    made.trainer.state.fn = "fit"
    saving = {
        "folder": made.save_ours,
        "file": made.save_file,
        "file, async_save: wait": made.stall_of_background,
        "DCP": made.save_dcp,
        "Lightning's file": made.save_lightning,
    }
    loading = {
        "folder": made.load_ours,
        "file": made.load_file,
        "DCP": made.load_dcp,
        "Lightning's file": made.load_lightning,
    }
    for title, work, target in (("save", saving, 1.15), ("load", loading, 1.0)):
        contenders = {name: in_turns(call, arguments) for name, call in work.items()}
        compare(f"{title}, 2 ranks", contenders, arguments, targets={"file": target})
        made.background.strategy.finish_saving()
    grown = growth(made.save_file)
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, grown)
    if dist.get_rank() == 0:
        print(f"memory that a save of one file takes, by rank: {held} MiB")
        index = CheckpointReader(folder / "ours.ckpt").index
        numel = sum(entry.numel for entry in index.weights.values())
        size = sum(file.stat().st_size for file in (folder / "ours.ckpt").iterdir())
        print(f"{numel:,} parameters, {size / 1e6:.0f} MB")
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.set_defaults(pairs=7, steps=1, warmup=1)
    parser.add_argument("--folder", type=Path, help="where to write; default: that for such files")
    parser.add_argument("--tensor", action="store_true", help="tp 2: columns of rowwise weights")
    options = parser.parse_args()
    root = options.folder or Path(tempfile.gettempdir())
    tensor = 2 if options.tensor else 1
    launch(lambda arguments: measure(arguments, root, tensor), read_arguments(options), ranks=2)


if __name__ == "__main__":
    main()
