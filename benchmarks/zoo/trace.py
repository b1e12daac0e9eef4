"""A full trace against a reference, in the manner of TTrace (arXiv 2506.09280); this code is ours.

Outputs of all modules, gradients of them, gradients of parameters before and after clipping, and
parameters after the update are joined from the ranks, and compared with those of one process with
the same weights and batch. What a difference may be is measured, too: the trace of one process
whose weights are moved by a few roundings.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.zoo.fault import Fault
from benchmarks.zoo.proof import trainer_alone, Verdict
from benchmarks.zoo.trainer import Trainer

__all__ = ["compare_traces"]

_ORDER = ("forward", "loss", "backward", "gradient", "clipped", "updated")
_PHASE = dict(
    zip(_ORDER, ("forward", "forward", "backward", "backward", "clip", "update"), strict=True)
)


def compare_traces(
    trainer: Trainer, saved: Mapping[str, Any], fault: Fault | None
) -> Verdict | None:
    """Trace a step on the ranks and on one process; return the first difference."""
    own = _trace(trainer)
    box: list[Verdict | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        alone = _trace(_alone(trainer, saved, fault, 0.0))
        roundings = 8 * torch.finfo(trainer.config.dtype).eps
        moved = _trace(_alone(trainer, saved, fault, roundings))
        box = [_first(trainer.step, own, alone, moved, least=max(1e-9, roundings))]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _alone(
    trainer: Trainer, saved: Mapping[str, Any], fault: Fault | None, moves: float
) -> Trainer:
    alone = trainer_alone(trainer, saved, fault)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in alone.model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + moves * drawn)
    return alone


def _trace(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    """Take a step that changes nothing; return what was seen, whole, on rank 0."""
    seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    micro = trainer.comm.layout.micro

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            if len(seen["forward", name]) < micro:  # later ones are computed again
                seen["forward", name].append(output.detach().clone())
                seen["backward", name].append(torch.zeros_like(output))
                number = len(seen["forward", name]) - 1

                def note(grad: Tensor) -> None:
                    seen["backward", name][number] = grad.clone()

                output.register_hook(note)

        return hook

    handles = [
        part.register_forward_hook(watch(name))
        for name, part in trainer.model.named_modules()
        if (name and not list(part.children())) or name.endswith(("attention", "mlp"))
    ]
    state = copy.deepcopy(
        (trainer.model.state_dict(), trainer.optimizer.first, trainer.optimizer.second)
    )
    count = trainer.optimizer.count
    loss = trainer.forward_backward(trainer.data.batch(trainer.step))
    for handle in handles:
        handle.remove()
    found = {("loss", ""): loss.reshape(1).clone()}
    found |= {("gradient", name): grad for name, grad in trainer.whole("gradients").items()}
    trainer.update()
    found |= {("clipped", name): grad for name, grad in trainer.whole("gradients").items()}
    found |= {("updated", name): weight for name, weight in trainer.whole("weights").items()}
    trainer.model.load_state_dict(state[0])
    trainer.optimizer.first, trainer.optimizer.second = state[1:]
    trainer.optimizer.count = count
    return {**_join_activations(trainer, dict(seen)), **found}


def _join_activations(trainer: Trainer, seen: Mapping[Any, list[Tensor]]) -> dict[Any, Tensor]:
    """Return activations of the whole batch from those of all ranks, on rank 0."""
    comm = trainer.comm
    sent: Any = [(comm.place, seen)]
    if comm.layout.world > 1:
        sent = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((comm.place, dict(seen)), sent)
    found: dict[Any, dict[Any, list[list[Tensor]]]] = defaultdict(lambda: defaultdict(list))
    for place, held in sent or []:
        tokens = place["cp"], place["tp"] if comm.layout.sequence else 0
        for key, parts in held.items():
            found[key][(place["dp"], place["ep"]), tokens].append(parts)
    return {key: _join(places, comm.layout.micro) for key, places in found.items()}


def _join(places: Mapping[Any, list[list[Tensor]]], micro: int) -> Tensor:
    # Copies of several ranks count by their mean, so that one that differs is seen.
    means = {at: [torch.stack(c).mean(0) for c in zip(*p, strict=True)] for at, p in places.items()}
    whole = []
    for number in range(micro):
        rows: dict[Any, list[Tensor]] = defaultdict(list)
        for samples, tokens in sorted(means):
            rows[samples].append(means[samples, tokens][number])
        whole.append(torch.cat([torch.cat(parts, 1) for parts in rows.values()]))
    return torch.cat(whole)


def _first(step: int, own: Any, alone: Any, moved: Any, *, least: float) -> Verdict | None:
    for key in sorted(alone, key=lambda key: _ORDER.index(key[0])):
        wanted, got = alone[key].double(), own[key].double()
        size = float(wanted.norm()) + 1e-12
        # The paper's tolerance: several times what roundings of the inputs change, which may be
        # nothing for a single number, such as the loss.
        bound = 20 * float((moved[key].double() - wanted).norm()) + least * size
        if wanted.shape != got.shape or not float((got - wanted).norm()) <= bound:
            return Verdict(step=step, phase=_PHASE[key[0]], text=f"{key[0]} of {key[1] or 'loss'}")
    return None
