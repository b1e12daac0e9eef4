"""The law of every strategy: the same loss, gradients and weights as one process."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from tests.ranks import run_ranks
from tests.toy import loader, ToyData, ToyModule

Result = dict[str, Any]

TOLERANCE = 1e-10  # float64: sums in another order differ by about 1e-15 a step


class Recorder(Callback):
    """Keeps loss and whole gradients of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = {}
        for name, parameter in pl_module.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            found[name] = None if grad is None else grad.clone()
        self.gradients.append(found)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def train(
    strategy: Any,
    *,
    devices: int,
    batch_size: int,
    size: int = 10,
    ignored: bool = False,
    shuffled: bool = False,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Result:
    """Run 3 batches (or what `size` samples give) in float64 and say what came out."""
    torch.set_default_dtype(torch.float64)
    recorder = Recorder()
    user = ToyModule(**(module or {}))
    made = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
        **(trainer or {}),
    )
    samples = ToyData(size, ignored)
    # Lightning shuffles the training data of replicas so; one process has to see the same order.
    order = DistributedSampler(samples, num_replicas=1, rank=0) if shuffled else None
    made.fit(
        user, loader(samples, batch_size, sampler=order), loader(ToyData(6, ignored), batch_size)
    )
    state = getattr(made.strategy, "lightning_module_state_dict", user.state_dict)()
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {k: v.detach().clone() for k, v in state.items()},
        "val_loss": float(made.callback_metrics["val_loss"]),
        "shapes": {
            n: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
            for n, p in user.named_parameters()
        },
    }


def train_rank(rank: int, world: int, strategy: str, options: dict[str, Any], run: Any) -> Result:
    """Run `train` on one rank of a mesh."""
    import lightning_par

    kind = {
        "tensor_parallel": lightning_par.TensorParallelStrategy,
        "pipeline_1f1b": lightning_par.Pipeline1F1BStrategy,
        "hybrid3d": lightning_par.Hybrid3DStrategy,
    }[strategy]
    return train(kind(**options), devices=world, **run)


def assert_parity(
    strategy: str, options: dict[str, Any], world: int, replicas: int, **run: Any
) -> list[Result]:
    """Compare a run on `world` ranks with one process that sees the batches of all replicas."""
    per_replica = run.pop("batch_size")
    try:
        whole = {**run, "batch_size": per_replica * replicas, "shuffled": replicas > 1}
        wanted = train("auto", devices=1, **whole)
    finally:
        torch.set_default_dtype(torch.float32)
    run = {**run, "batch_size": per_replica}
    results: list[Result] = run_ranks(train_rank, world, strategy, options, run, timeout=120)
    for result in results:
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=0, atol=1e-6)
        assert abs(result["val_loss"] - wanted["val_loss"]) < 1e-6
        assert len(result["gradients"]) == len(wanted["gradients"])
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for name, grad in got.items():
                tied = "model.embed.weight" if name not in want else name
                assert grad is not None, f"{name} has no gradient"
                torch.testing.assert_close(
                    grad, want[tied], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
                )
    seen = {name for r in results for g in r["gradients"][:1] for name in g}
    assert set(wanted["gradients"][0]) <= seen
    weights = results[0]["weights"]
    assert list(weights) == list(wanted["weights"])
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight,
            wanted["weights"][name],
            rtol=0,
            atol=TOLERANCE,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return results
