"""Norms of gradients over all ranks, for whoever asks for them: users, torch's and Lightning's
functions.

Note [Hooks of a step]: while the hooks between the backward and the optimizer run,
`torch.nn.utils.get_total_norm`, by which `clip_grad_norm_` clips, and Lightning's `grad_norm` give
the norms of the whole model. Under a pipeline a norm is that of all stages if every stage asks for
all its gradients, or for the same group of an optimizer; of one stage, if the others ask for none.
Anything else is refused, as is a hook that draws random numbers for gradients, or that combines
those of several parameters itself: a stage has those of its own only. A hook in a whole view (Note
[Whole view] in `hooks/whole_view.py`) names the same gradients on all stages, and may combine them.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.dtensor import local_part, whole
from lightning_par.engine.data.gradient_reduction import is_counted_here
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.hooks.across_parameters import AcrossParameters
from lightning_par.strategies.step.absent_parameter import AbsentParameter
from lightning_par.strategies.step.step_errors import explain_mixing
from lightning_par.upstream.functions import diverted

__all__ = ["GradientNorms"]

_END, _NOTHING, _ALL, _PART, _GROUPS = 0, 1, 2, 3, 4
_CURE = (
    "To get the norm of every parameter's gradient over all stages and shards, call "
    "trainer.strategy.gradient_norms() on every rank. To clip by the norm of the whole model, use "
    "Trainer(gradient_clip_val=...)."
)


class GradientNorms:
    """Gives the norms of the gradients of the whole model; see Note [Hooks of a step].

    Args:
        module: The user's LightningModule on this rank.
        mesh: Mesh of this run.
        canonical: FQN of every parameter of the whole model -> its canonical FQN.
        elsewhere: Ids of parameters that another rank counts.
        device: Device of this rank.

    Attributes:
        watch: Looks for combined gradients while hooks run for the first time.
        pause_view: Ends, for a while, the whole view of a hook that has one.
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
        # Asked for in every step: properties of the sizes compute them anew.
        self._is_alone, self._stages = mesh.sizes.world_size == 1, mesh.sizes.pipeline
        self._names = list(dict.fromkeys(self._canonical.values()))
        self._quiet: set[str] = set()  # hooks that asked for nothing in their first run
        self._groups: list[set[int]] = []
        self._drawn: list[Tensor] = []
        self._calls = 0
        self.watch: AcrossParameters | None = None
        self.pause_view: Callable[[], AbstractContextManager[None]] | None = None

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
    def in_hooks(self, name: str, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Surrounds hooks of users on gradients.

        Args:
            name: Of the hooks, for messages.
            optimizers: Those whose groups may be asked for.

        **Communicates**: under a pipeline a number over the ``pp`` axis the first time.
        """
        if self._is_alone:
            yield
            return
        pipelined = self._stages > 1
        self._drawn = self._draws() if pipelined else []
        self._calls = 0
        # By id: a hook hands over gradients, whose parameters are found by identity only.
        self._groups = [{id(p) for p in g["params"]} for o in optimizers for g in o.param_groups]
        with ExitStack() as stack:
            if pipelined and name not in self._quiet:
                self.watch = AcrossParameters(name, self._module, _CURE)
                stack.enter_context(self.watch)
                stack.callback(setattr, self, "watch", None)
            total, of_module = self._unwatched(self._total), self._unwatched(self._of)
            stack.enter_context(diverted(torch.nn.utils.get_total_norm, total))
            stack.enter_context(diverted(grad_norm, of_module))
            try:
                yield
            except RuntimeError as error:
                told = explain_mixing(self._module, error)
                if told is None:
                    raise
                raise told from error
        self._refuse_draws(name)
        # Answers a stage that still asks for a norm: without this last message it would wait for
        # ever for a stage whose hook has ended.
        if pipelined and name not in self._quiet:
            kinds, _ = self._exchange(_END)
            if any(kind != _END for kind in kinds):
                self._refuse("the pipeline stages compute different numbers of norms")
            if not self._calls:
                self._quiet.add(name)

    @contextmanager
    def in_view(self, pause: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Surrounds one of these hooks that sees the gradients of all stages.

        Args:
            pause: Lets this package see those of this rank.
        """
        with self.paused():
            self.pause_view = pause
            try:
                yield
            finally:
                self.pause_view = None
                # What is drawn inside is that of one process.
                self._drawn = self._draws()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what this package does itself while hooks run."""
        with ExitStack() as stack:
            if self.watch is not None:
                stack.enter_context(self.watch.paused())
            if self.pause_view is not None:
                stack.enter_context(self.pause_view())
            yield

    def _draws(self) -> list[Tensor]:
        """Return the states of the generators from which hooks draw."""
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _refuse_draws(self, name: str) -> None:
        if all(map(torch.equal, self._drawn, self._draws())):
            return
        raise ConfigurationError(
            "LP311",
            f"pipeline_parallel_size={self._stages}: a hook between backward and optimizer step "
            f"({name}) draws random numbers. One process draws numbers for all parameters in "
            "order. A pipeline stage draws numbers for its own parameters only, so the parameters "
            "would get different numbers. Give each parameter its own generator, seeded by the "
            "name of the parameter and the step: torch.empty_like(p.grad).normal_(generator=g) "
            "with g = torch.Generator(p.device), g.manual_seed(zlib.crc32(f'{trainer.global_step} "
            "{name}'.encode())); or use pipeline_parallel_size=1. No weight was changed in this "
            "step.",
        )

    def _unwatched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return run

    def _of(
        self, module: nn.Module, norm_type: float | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        """Do what Lightning's `grad_norm` does, for the whole model or a part of it."""
        norm_type = float(norm_type)
        if norm_type <= 0:
            raise ValueError(f"`norm_type` must be a positive number or 'inf'. Got {norm_type}")
        self._calls += 1
        known = (name for name, child in self._module.named_modules() if child is module)
        prefix = next(known, None)
        if prefix is None:
            raise ConfigurationError(
                "LP410",
                f"grad_norm was called with a {type(module).__name__} that is not a part of the "
                "trained LightningModule, so its gradients are not known on a mesh. Call "
                "grad_norm(self, norm_type) or pass one of its submodules.",
            )
        start = f"{prefix}." if prefix else ""
        # Names are those below the module that was asked for, as Lightning's function gives them.
        found = {
            name.removeprefix(start): norm
            for name, norm in self.of_parameters(norm_type).items()
            if name.startswith(start)
        }
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
        self._calls += 1
        asked = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads = [grad for grad in asked if not isinstance(grad, AbsentParameter)]
        owners = {id(p.grad): id(p) for p in self._module.parameters() if p.grad is not None}
        kind = self._kind(grads, owners)
        if self._stages > 1:
            is_one = kind == _PART and len(grads) == 1  # no other stage has a part of it
            # The norm of one gradient is whole where its shards are: no other stage takes part.
            if is_one and self.pause_view is None:
                norm = whole(torch.linalg.vector_norm(grads[0], norm_type))
                return norm.to(grads[0].dtype)
            self._agree(kind, asked)
        # What is no gradient of the model is taken to be alike on every rank.
        square = torch.zeros(1, 1, dtype=torch.float64, device=self._device)
        powers = [self._power(g, norm_type, owners.get(id(g))) for g in grads]
        if powers:
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

    def _kind(self, grads: Sequence[Tensor], owners: Mapping[int, int]) -> int:
        asked = {owners.get(id(grad), -1) for grad in grads}
        if not asked:
            return _NOTHING
        if asked == set(owners.values()):
            return _ALL
        held = set(owners.values())
        groups = [number for number, group in enumerate(self._groups) if group & held == asked]
        return _GROUPS + groups[0] if groups else _PART

    def _exchange(self, kind: int, names: int = 0) -> tuple[list[int], list[int]]:
        group = self._mesh.group("pp")
        told = torch.zeros(2, group.size(), dtype=torch.int64)  # between the hosts, which ask
        told[:, group.rank()] = torch.tensor([kind, names])
        dist.all_reduce(told, group=group)
        kinds, every = told.tolist()
        return kinds, every

    def _agree(self, kind: int, asked: Sequence[Tensor]) -> None:
        """Refuse a norm that stages ask for with parts that do not belong together."""
        # The names travel with the kind: stages in a whole view may ask for any part, if it is
        # the same part everywhere.
        kinds, every = self._exchange(kind, self._checksum(asked))
        if _END in kinds:
            self._refuse("the pipeline stages compute different numbers of norms")
        if self.pause_view is not None and len({*every}) == 1:
            return  # all have named the same gradients
        asking = {k for k in kinds if k != _NOTHING}
        if len([k for k in kinds if k != _NOTHING]) > 1 and (_PART in asking or len(asking) > 1):
            self._refuse("every pipeline stage computes a norm over some of its own gradients")

    def _checksum(self, asked: Sequence[Tensor]) -> int:
        """Return a number of the names of gradients, of whatever stage."""
        named = self._module.named_parameters()
        names = {id(p.grad): f"{self._canonical[n]}.grad" for n, p in named if p.grad is not None}
        known = (g.fqn if isinstance(g, AbsentParameter) else names.get(id(g), "") for g in asked)
        return zlib.crc32(" ".join(sorted(known)).encode())

    def _refuse(self, what: str) -> None:
        raise ConfigurationError(
            "LP410",
            f"pipeline_parallel_size={self._stages}: in a hook between backward and optimizer "
            f"step {what}. It is not known whether these norms are parts of one norm over the "
            f"whole model. {_CURE}",
        )
