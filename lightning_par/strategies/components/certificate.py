"""The certificate of a run, which rank 0 writes where a fit ends."""

import logging
import math
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_par.observe.certificate import CERTIFICATE, Certificate
from lightning_par.observe.weights_hash import WeightsHash
from lightning_par.strategies.components.checkpoint_save import mesh_sizes
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.post_mortem.run_folder import find_folder
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.version import __version__

__all__ = ["write_certificate"]

_logger = logging.getLogger(__name__)


def write_certificate(
    model: ParallelModel,
    options: MeshOptions,
    decisions: Decisions,
    proofs: Mapping[str, str],
    largest: int,
) -> None:
    """Write what the run was into its directory, if it writes anything there.

    Args:
        model: The model on its mesh, after the last step.
        options: Of the strategy.
        decisions: Of the run.
        proofs: What was compared with one process -> what came out, on rank 0.
        largest: Bytes of weights above which they are not hashed, unless the proof was asked for.

    **Communicates**: the directory; every weight, one at a time, to all ranks.
    """
    trainer = model.module.trainer
    folder = find_folder(trainer)
    if folder is None:
        return
    # The same on every rank, which decides alike whether there is a gather.
    size = model.forms.whole_bytes
    if size > largest and options.verify in ("auto", False):
        weights: dict[str, Any] = {
            "note": f"no hash: the model has {size / 2**30:.1f} GiB of weights, more than "
            f'{largest / 2**30:g}. verify="first_step" hashes them.'
        }
    else:
        weights = _hash_weights(model)
    loop = trainer.fit_loop
    made = Certificate(
        versions={
            "lightning_par": __version__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
        layout=mesh_sizes(model.mesh.sizes),
        # As the user gave them, not as they were resolved: what was decided stands in
        # `decisions`.
        options={each.name: _plain(getattr(options, each.name)) for each in fields(options)},
        seed=model.steps.seed,
        precision=str(trainer.precision),
        steps=trainer.global_step,
        data={
            # `ready` counts epochs that began, from 1.
            "epoch": max(0, loop.epoch_progress.current.ready - 1),
            "batch": loop.epoch_loop.batch_progress.current.completed,
        },
        proofs=dict(proofs),
        decisions=[dict(vars(made)) for made in decisions],
        weights=weights,
    )
    # Made on every rank, since the hash above is a collective; one writes.
    if model.mesh.rank == 0:
        _write(made, folder)


def _write(made: Certificate, folder: str) -> None:
    try:
        files = get_filesystem(folder)
        files.makedirs(folder, exist_ok=True)
        with files.open(f"{folder}/{CERTIFICATE}", "w") as file:
            file.write(made.to_json())
    except Exception as error:  # whatever a file system raises: the run itself is over
        _logger.warning("the certificate of the run cannot be written to %s: %s", folder, error)


def _hash_weights(model: ParallelModel) -> dict[str, Any]:
    """Return the hash of all parameters in the order of their names.

    **Communicates**: every parameter, to all ranks.
    """
    # Tied weights once, under the name that a layout does not change.
    canonical = model.resolved.canonical
    held = {canonical[n] for n, _ in model.module.named_parameters() if n in canonical}
    if model.mesh.sizes.pipeline > 1:
        stages: list[Any] = [None] * model.mesh.sizes.pipeline
        # All ranks have to walk through the same names in the same order, also those of other
        # stages: `full_parameter` is a collective.
        dist.all_gather_object(stages, held, group=model.mesh.group("pp"))
        held = set().union(*stages)
    gone = sorted({*canonical.values()} - held)
    if gone:  # as after pruning
        return {"note": f"no hash: the run has replaced the parameter {gone[0]}."}
    found = WeightsHash()
    for name in sorted(held):
        value = model.full_parameter(name)
        if model.mesh.rank == 0:
            found.add(name, value)
    return found.result()


def _plain(value: Any) -> Any:
    """Return an option as JSON has it; of an object that is no value, the name of its class."""
    # JSON has no infinity, which some limits are.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return str(value) if isinstance(value, timedelta | Path) else type(value).__name__
