"""Norms of gradients over all ranks, for whoever asks for them: users, torch's and Lightning's
functions.

Note [Hooks of a step]: while the hooks between the backward and the optimizer run,
`torch.nn.utils.get_total_norm`, by which `clip_grad_norm_` clips, and Lightning's `grad_norm` give
the norms of the whole model. Under a pipeline these hooks are in a whole view (Note [Whole view] in
`hooks/whole_view.py`), so that all stages name the same gradients.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_part
from lightning_par.engine.data.gradient_reduction import is_counted_here
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.step.absent_parameter import AbsentParameter
from lightning_par.strategies.step.parameter_reads import ParameterReads
from lightning_par.strategies.step.step_errors import explain_mixing
from lightning_par.upstream.functions import diverted

__all__ = ["GradientNorms"]

_NAMED = 3  # gradients of which a norm is asked, in messages


class GradientNorms:
    """Gives the norms of the gradients of the whole model; see Note [Hooks of a step].

    Args:
        module: The user's LightningModule on this rank.
        mesh: Mesh of this run.
        canonical: FQN of every parameter of the whole model -> its canonical FQN.
        elsewhere: Ids of parameters that another rank counts.
        device: Device of this rank.

    Attributes:
        reads: Knows whether a hook has a whole view; set before the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        canonical: Mapping[str, str],
        elsewhere: frozenset[int],
        device: torch.device,
    ) -> None:
        self._module, self._mesh, self._canonical = module, mesh, dict(canonical)
        self._elsewhere, self._device = elsewhere, device
        self._is_alone, self._stages = mesh.sizes.world_size == 1, mesh.sizes.pipeline
        self._names = list(dict.fromkeys(self._canonical.values()))
        self.reads: ParameterReads

    def of_parameters(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Return FQN -> norm of every parameter that has a gradient, the same on every rank.

        **Communicates**: one all-reduce of two numbers for each parameter, over all ranks.
        """
        place = {name: number for number, name in enumerate(self._names)}
        # [2, parameters]: powers of norms, and whether any rank holds a gradient. One tensor, so
        # that one all-reduce does for both.
        found = torch.zeros(2, len(self._names), dtype=torch.float64, device=self._device)
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                number = place[self._canonical[name]]
                found[0, number] = self._power(parameter.grad, norm_type, id(parameter))
                found[1, number].fill_(1)  # an assignment would be a copy from the host
        norms, held = self._root(self._reduce(found, norm_type)[0], norm_type), found[1].tolist()
        return {n: norms[i] for i, n in enumerate(self._names) if held[i]}

    @contextmanager
    def in_hooks(self) -> Iterator[None]:
        """Surrounds hooks of users on gradients."""
        if self._is_alone:
            yield
            return
        total = diverted(torch.nn.utils.get_total_norm, self._total)
        try:
            with total, diverted(grad_norm, self._of):
                yield
        except RuntimeError as error:
            told = explain_mixing(self._module, error)
            if told is None:
                raise
            raise told from error

    def _of(
        self, module: nn.Module, norm_type: float | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        """Do what Lightning's `grad_norm` does, for the whole model or a part of it."""
        norm_type = float(norm_type)
        if norm_type <= 0:
            raise ValueError(f"`norm_type` must be a positive number or 'inf'. Got {norm_type}")
        children = self._module.named_modules()
        prefix = next((name for name, child in children if child is module), None)
        if prefix is None:
            raise ConfigurationError(
                "LP410",
                f"grad_norm was called with a {type(module).__name__} that is not a part of the "
                "trained LightningModule, so its gradients are not known on a mesh. Call "
                "grad_norm(self, norm_type), or pass a submodule of the LightningModule.",
            )
        start = f"{prefix}." if prefix else ""
        with self.reads.paused_in_hooks():
            norms_of_all = self.of_parameters(norm_type).items()
        # Names are those below the module that was asked for, as Lightning's function gives them.
        found = {n.removeprefix(start): norm for n, norm in norms_of_all if n.startswith(start)}
        key = f"grad_{norm_type}_norm"
        norms = {f"{key}{group_separator}{name}": norm.float() for name, norm in found.items()}
        if norms:
            norms[f"{key}_total"] = torch.stack(list(norms.values())).norm(norm_type)
        return norms

    def _total(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Do what `torch.nn.utils.get_total_norm` does, for gradients over the whole mesh."""
        asked = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._stages > 1:
            self.reads.agree(self._names_of(asked))
        grads = [grad for grad in asked if not isinstance(grad, AbsentParameter)]
        # What is no gradient of the model is taken to be alike on every rank.
        square = torch.zeros(1, 1, dtype=torch.float64, device=self._device)
        with self.reads.paused_in_hooks():
            owners = {id(p.grad): id(p) for p in self._module.parameters() if p.grad is not None}
            if powers := [self._power(g, norm_type, owners.get(id(g))) for g in grads]:
                stacked = torch.stack(powers)
                square += stacked.max() if norm_type == float("inf") else stacked.sum()
            total = self._root(self._reduce(square, norm_type)[0, 0], norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite.")
        return total.to(asked[0].dtype) if asked else total

    def _power(self, grad: Tensor, norm_type: float, owner: int | None) -> Tensor:
        """Return what this rank adds to the sum of powers of all entries, or to their maximum."""
        local = local_part(grad)
        counts = is_counted_here(grad) and owner not in self._elsewhere
        # A tensor of the user's is the same on every rank, and the sum is over all ranks.
        if owner is None and not isinstance(grad, DTensor):
            counts = self._mesh.rank == 0
        # In float32 at least, and float64 from there on: the squares of float16 overflow at 256.
        wide = torch.promote_types(local.dtype, torch.float32)
        norm = torch.linalg.vector_norm(local, norm_type, dtype=wide).real.double()
        power = norm if norm_type == float("inf") else norm**norm_type
        # Not times 0: infinity would become NaN.
        counted: Tensor = power if counts else torch.zeros_like(power)
        return counted.to(self._device)

    def _reduce(self, values: Tensor, norm_type: float) -> Tensor:
        largest = norm_type == float("inf")
        # Over all ranks, whether they hold the parameter or not: nobody has to know who does.
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return values

    def _root(self, power: Tensor, norm_type: float) -> Tensor:
        root: Tensor = power if norm_type == float("inf") else power ** (1 / norm_type)
        return root

    def _names_of(self, asked: Sequence[Tensor]) -> str:
        """Return which norm is asked for, the same text on the stages that ask for the same."""
        with self.reads.paused_in_hooks():
            held = [(n, p.grad) for n, p in self._module.named_parameters() if p.grad is not None]
            names = {id(grad): self._canonical[name] for name, grad in held}
            for grad in asked:
                if isinstance(grad, AbsentParameter):
                    names[id(grad)] = grad.fqn.removesuffix(".grad")
            every = sorted(names.get(id(grad), "") for grad in asked)
        # Of all names, as a message has room for a few.
        checksum = zlib.crc32(" ".join(every).encode())
        return f"the norm of {len(every)} gradients, {', '.join(every[:_NAMED])} ... ({checksum:x})"
