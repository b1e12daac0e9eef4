"""The path of a gradient from the backward to the optimizer, as one ordered list of actions.

Before it, autograd computes the gradient, and FSDP averages it over the replicas in the backward.

Note [Order of the path]: copies are summed after the average over replicas, as the sum gives all
its ranks the same bits. Gradients leave for the host when they are final. The norm comes next, as
it decides, the same on every rank, whether the step is refused, and by how much it is clipped.

Length: the actions, and the precision plugin that runs each phase of them.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.dtensor import local_part
from lightning_par.engine.data.compression.reduction import CompressedGradients
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.data.gradient_reduction import (
    clip_by_norm,
    clip_by_value,
    ReplicatedGradients,
    SharedGradients,
    total_norm,
)
from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.errors import NonFiniteError
from lightning_par.mesh import ParallelMesh
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.optimizers.local_step import end_local_step
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.step.gradient_norms import GradientNorms
from lightning_par.strategies.step.loss_form import FormWatch
from lightning_par.upstream.lightning import CLIP_GRADIENTS, plain_after_closure

__all__ = ["GradientAction", "GradientPath", "MeshPrecision", "Phase", "mesh_precision"]

_NAMED = 3
"""How many parameters and ranks a message names."""
_SEE_GRADIENTS = (
    "on_after_backward",
    "optimizer_step",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
_logger = logging.getLogger(__name__)


class Phase(Enum):
    """When an action runs."""

    BACKWARD = "after the last backward of a step"
    UNSCALE = "before the optimizer step, by the precision plugin"
    STEP = "before the optimizer step"
    CLIP = "before the optimizer step, in configure_gradient_clipping"


@dataclass(kw_only=True, eq=False)
class _Passage:
    """What one walk along a phase knows of the gradients.

    Attributes:
        parameters: Parameters of the optimizer.
        loss: Sum of the losses of the step, NaN where its form is new; None: it does not matter.
        unmarked: That sum as it is.
        norm: Norm over all ranks, once an action has computed it.
        bound: Largest norm, or largest entry.
        by_value: Whether entries are clipped, not the norm.
    """

    parameters: Sequence[nn.Parameter] = ()
    loss: Tensor | None = None
    unmarked: Tensor | None = None
    norm: Tensor | None = None
    bound: float = 0.0
    by_value: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientAction:
    """One action on the gradients, such as a sum of copies.

    Attributes:
        name: What it does to the gradients.
        phase: When it runs.
        run: Does it; None where the precision plugin does.
    """

    name: str
    phase: Phase
    run: Callable[[_Passage], None] | None

    def __str__(self) -> str:
        return f"{self.name} ({self.phase.value})"


class GradientPath:
    """The actions on the gradients, in order; `print` shows them.

    Args:
        module: The user's LightningModule, which holds this rank's parameters.
        mesh: Mesh of this run.
        sharding: Knows whether gradients are accumulated over batches.
        shared: Parameters whose gradients are summed, or averaged, over ranks that hold copies.
        compression: Averages gradients over the replicas; None: FSDP does.
        counted_elsewhere: Ids of parameters that another rank counts in the norm.
        options: Says what happens to a step that is not finite.
        norms: Gives the norms that users ask for.

    Attributes:
        actions: All actions, in order.
        norms: Gives the norms that users ask for.
        around_hook: Calls code of a user's as a hook of a name is called; None: a plain call does.
        mixes_kinds: Whether some parameters of this rank are DTensors, and others are not.
        form: Notices where the loss takes another form; None: nobody watches.
        before_refusal: Called on every rank before the error of a step that is not finite.
    """

    def __init__(
        self,
        *,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        sharding: Sharding,
        shared: tuple[SharedGradients | ReplicatedGradients, ...],
        compression: CompressedGradients | None,
        counted_elsewhere: frozenset[int],
        options: MeshOptions,
        norms: GradientNorms,
    ) -> None:
        self.norms = norms
        self.around_hook: Callable[[str, Any, Callable[[], Any]], Any] | None = None
        self.form: FormWatch | None = None
        self.before_refusal: Callable[[], None] | None = None
        self.shared, self.compression = shared, compression
        self.counted_elsewhere = counted_elsewhere
        self._module, self._sizes, self._sharding = module, mesh.sizes, sharding
        self._on_nonfinite = options.on_nonfinite
        kinds = {isinstance(parameter, DTensor) for parameter in module.parameters()}
        self.mixes_kinds = len(kinds) > 1
        self._host: HostOptimizer | None = None
        self._scaler: MeshGradScaler | None = None
        self._loss: Tensor | None = None  # sum over the batches since the last optimizer step
        self._norm: Tensor | None = None  # known between judging a step and clipping it
        self._absent = torch.zeros(())  # gradients that some rank lacks
        self._copies = [p for copies in shared for p in copies.parameters]
        self._left: list[tuple[nn.Parameter, Tensor]] | None = None  # of steps before, in one
        self.actions = tuple(self._list_actions())

    def __str__(self) -> str:
        return "\n".join(f"{number}. {action}" for number, action in enumerate(self.actions, 1))

    @property
    def host(self) -> HostOptimizer | None:
        """Optimizer on the host, for which gradients leave; None: it is on the device."""
        return self._host

    @host.setter
    def host(self, host: HostOptimizer | None) -> None:
        self._host = host
        self._connect()

    @property
    def scaler(self) -> MeshGradScaler | None:
        """Scaler of the loss, which judges overflows and leaves such steps out."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: MeshGradScaler | None) -> None:
        self._scaler = scaler
        self._connect()

    def _connect(self) -> None:
        if self._scaler is not None:
            # The scaler divides the gradients on the host, too, by a factor of their update. Either
            # setter connects both, as host and scaler become known in any order.
            host = self._host
            self._scaler.offloaded_gradients = None if host is None else host.offloaded_gradients
        self.actions = tuple(self._list_actions())

    def _list_actions(self) -> Iterator[GradientAction]:
        def action(
            name: str, phase: Phase, run: Callable[[_Passage], None] | None
        ) -> GradientAction:
            return GradientAction(name=name, phase=phase, run=run)

        if self.compression is not None:
            yield action("average over the replicas, compressed", Phase.BACKWARD, self._compress)
        if self._sharding.absent is not None:
            name = "None where no replica has a gradient"
            yield action(name, Phase.BACKWARD, self._agree_on_absent)
        for copies in self.shared:
            verb = "sum" if isinstance(copies, SharedGradients) else "average"
            name = f"{verb} copies over {_axes(copies.group, self._sizes)}"
            yield action(name, Phase.BACKWARD, partial(_reduce, copies))
        if self._host is not None:
            yield action("send to the host", Phase.BACKWARD, self._send)
        if self._scaler is not None:
            name = "divide by the loss scale; on overflow leave the step out"
            yield action(name, Phase.UNSCALE, None)
        # With a scaler a gradient that is not finite is an overflow of the scaled loss, no error:
        # the scaler leaves the step out and lowers its factor.
        judges = self._on_nonfinite != "ignore" and self._scaler is None
        yield action("norm over all ranks", Phase.STEP if judges else Phase.CLIP, self._find_norm)
        if judges:
            verdict = "raise" if self._on_nonfinite == "raise" else "leave the step out"
            yield action(f"{verdict} if the norm or a loss is not finite", Phase.STEP, self._refuse)
        yield action("clip", Phase.CLIP, self._clip)

    def _walk(self, phase: Phase, passage: _Passage) -> None:
        with self.norms.reads.paused_in_hooks():
            for action in self.actions:
                if action.phase is phase and action.run is not None:
                    action.run(passage)

    @property
    def reduced_late(self) -> frozenset[int]:
        """Ids of parameters whose gradients are not final when autograd and FSDP have them."""
        late = (*self.shared, *([] if self.compression is None else [self.compression]))
        return frozenset(id(p) for reduced in late for p in reduced.parameters)

    def _agree_on_absent(self, _: _Passage) -> None:
        """See Note [When replicas agree] in `engine/data/absent_gradients.py`."""
        absent = self._sharding.absent
        assert absent is not None
        has_norm = self._on_nonfinite != "ignore" and self._scaler is None and self._host is None
        # `_refuse` waits for the norm anyway, and the number of absent gradients can come with
        # it: then nobody has to wait for the device here. Code that sees gradients first cannot.
        waits = has_norm and self._module.automatic_optimization and not absent.are_usual
        if not waits or self._sees_gradients:
            absent.agree()

    @property
    def _sees_gradients(self) -> bool:
        """Whether code of the user's runs between the backward and the optimizer step."""
        return any(map(self._has_hook, _SEE_GRADIENTS))

    def _has_hook(self, name: str) -> bool:
        callbacks = cast(Any, self._module.trainer).callbacks
        return _is_own(name, self._module, pl.LightningModule) or any(
            _is_own(name, callback, pl.Callback) for callback in callbacks
        )

    def in_hooks(self, names: Sequence[str], *, surely: bool) -> AbstractContextManager[None]:
        """Surrounds hooks of users on gradients, of these names; spared in a step without any.

        Args:
            names: The hooks that run inside.
            surely: Whether other code of a user's runs inside, too.
        """
        hooks = surely or any(map(self._has_hook, names))
        return self.norms.in_hooks() if hooks else nullcontext()

    def add_loss(self, loss: Tensor, has_valid_labels: Tensor | None = None) -> None:
        """Remember the loss of one backward; those of accumulated batches add up.

        Args:
            loss: Scalar loss, weighted and scaled.
            has_valid_labels: Whether it counts, as the mean over no valid entry is NaN by itself;
                None: it does.
        """
        if self._on_nonfinite != "ignore":
            loss = loss.detach()
            if has_valid_labels is not None:
                # torch.where, as NaN * 0 is NaN; on the device, without asking what the flag is.
                loss = torch.where(has_valid_labels.to(loss.device), loss, 0)
            self._loss = loss if self._loss is None else self._loss + loss

    def _marked(self, loss: Tensor | None) -> Tensor | None:
        """Return a loss, or NaN where all ranks have to be told of its new form."""
        return loss if loss is None or self.form is None else self.form.marked(loss)

    @contextmanager
    def of_one_backward(self) -> Iterator[None]:
        """Surrounds a backward and what follows it.

        Gradients that are summed over ranks already are set aside, not to be summed once more: in
        manual optimization those of earlier backwards, as each gives final gradients; else those
        that nobody has zeroed since the last update.
        """
        if self._left is None:
            # What is frozen keeps its own, as a network that is not trained in this backward.
            trained = (p for p in self._copies if p.requires_grad)
            self._left = [(p, p.grad) for p in trained if p.grad is not None]
            for parameter, _ in self._left:
                parameter.grad = None
        for copies in self.shared if self._sharding.synchronizes else ():
            copies.begin()
        try:
            yield
        finally:
            for copies in self.shared:
                copies.end()
            if self._sharding.synchronizes or not self._module.automatic_optimization:
                with torch.no_grad():
                    for one, left in self._left:
                        one.grad = left if one.grad is None else one.grad.add_(left)
                self._left = None

    def after_backward(self) -> None:
        """Run the actions that follow a step's last backward; none while batches accumulate.

        **Communicates**: compressed gradients, over the replicas; one all-reduce for every group
        that shares parameters.
        """
        if self._host is not None and self._host.keeps_gradients:
            return
        # Until the last of accumulated batches, gradients are this rank's own sums. A reduction
        # now would be reduced once more, with what the later batches add.
        if self._sharding.synchronizes:
            self._walk(Phase.BACKWARD, _Passage(loss=self._marked(self._loss)))

    def before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Run the actions that judge a step, before its gradients are clipped.

        Args:
            parameters: Parameters of the optimizer that is about to step.

        Raises:
            NonFiniteError: On every rank, if a loss or gradient of any is not finite.

        **Communicates**: one all-reduce of one number over all ranks, which clipping then spares.
        """
        loss, self._loss = self._loss, None
        passage = _Passage(parameters=parameters, loss=self._marked(loss), unmarked=loss)
        self._walk(Phase.STEP, passage)
        if self.form is not None:
            is_judged = self._on_nonfinite != "ignore" and self._scaler is None
            self.form.end(is_judged=is_judged)
        own = is_overridden("configure_gradient_clipping", self._module, pl.LightningModule)
        # A module that clips in its own way may change gradients first.
        self._norm = None if own else passage.norm

    def clip(self, parameters: Sequence[nn.Parameter], bound: float, *, by_value: bool) -> None:
        """Run the actions that clip.

        Args:
            parameters: Parameters of the optimizer.
            bound: Largest norm of the whole model's gradient, or largest absolute entry.
            by_value: Whether entries are clamped, not the norm.

        **Communicates**: one all-reduce of one number over all ranks, unless the norm is known or
        entries are clamped.
        """
        passage = _Passage(parameters=parameters, norm=self._norm, bound=bound, by_value=by_value)
        self._walk(Phase.CLIP, passage)

    def end_step(self) -> None:
        """Forget what held for one optimizer step."""
        self._norm = None

    def _compress(self, passage: _Passage) -> None:
        assert self.compression is not None
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self.compression.reduce(scale, loss=passage.loss)

    def _send(self, _: _Passage) -> None:
        assert self._host is not None
        self._host.finish(hooks_follow=True)

    def _find_norm(self, passage: _Passage) -> None:
        if passage.norm is None and not passage.by_value:
            passage.norm = self._total_norm(passage)

    def _total_norm(self, passage: _Passage) -> Tensor:
        norms: Sequence[tuple[Tensor, float]] = ()
        if self._host is not None:
            here = lambda p: id(p) not in self.counted_elsewhere  # noqa: E731
            norms = self._host.offloaded_gradients.norms(here)
        absent = self._sharding.absent
        norm, self._absent = total_norm(
            passage.parameters,
            device=self._module.device,
            elsewhere=self.counted_elsewhere,
            loss=passage.loss,
            offloaded_norms=norms,
            count=0 if absent is None else len(absent.filled),
        )
        return norm

    def _refuse(self, passage: _Passage) -> None:
        """Raise, or leave the step out, if the loss or a gradient is not finite on any rank."""
        assert passage.norm is not None
        # The one wait for the device in a step; from here on the norm is on the host.
        norm, count = torch.stack([passage.norm, self._absent.to(passage.norm)]).cpu()
        passage.norm = norm
        # Summed over all ranks, so that all of them enter this collective, or none.
        if self._sharding.absent is not None and int(count):
            self._sharding.absent.agree()
        if bool(norm.isfinite()):
            return
        # The norm is the same on every rank, so that all of them reach this collective.
        if self.form is not None and self.form.settle():
            passage.loss = passage.unmarked
            norm = passage.norm = self._total_norm(passage).cpu()
            if bool(norm.isfinite()):
                return
        passage.norm = None
        text = self._explain(norm, passage.loss)
        if self._on_nonfinite == "raise":
            if self.before_refusal is not None:
                self.before_refusal()
            raise NonFiniteError(
                "LP313",
                f"{text} No weight was changed. To find the operation that computes NaN first, "
                "use Trainer(detect_anomaly=True). To skip such steps, use on_nonfinite='skip'. "
                "To update the weights in such steps, too, use on_nonfinite='ignore'.",
            )
        # torch's optimizers pass over parameters without a gradient: weights and states stay.
        for parameter in passage.parameters:
            parameter.grad = None
        if self._host is not None:
            self._host.drop()
        if dist.get_rank() == 0:
            _logger.warning("%s This step is skipped.", text)

    def _clip(self, passage: _Passage) -> None:
        parameters, bound = passage.parameters, passage.bound
        if passage.by_value:
            clip_by_value(parameters, bound)
            if self._host is not None:
                self._host.offloaded_gradients.largest = bound
            return
        # Known, unless the step was judged and the module clips in its own way.
        norm = self._total_norm(passage) if passage.norm is None else passage.norm
        clip_by_norm(parameters, norm, bound)
        if self._host is not None:
            self._host.offloaded_gradients.clip_by_norm(norm, bound)

    def _explain(self, norm: Tensor, loss: Tensor | None) -> str:
        """Say on which ranks what is not finite, the same on every rank.

        **Communicates**: a few names, between all ranks.
        """
        bad_loss = None if loss is None or bool(loss.isfinite().all()) else float(loss)
        found: list[Any] = [None] * self._sizes.world_size
        on_host = set() if self._host is None else self._host.offloaded_gradients.nonfinite()
        mine = bad_loss, _nonfinite_names(self._module.named_parameters(), on_host)
        dist.all_gather_object(found, mine)
        with_loss = [rank for rank, (bad, _) in enumerate(found) if bad is not None]
        ranks = with_loss or [rank for rank, (_, names) in enumerate(found) if names]
        said = [_say(self._sizes.describe(rank), *found[rank]) for rank in ranks[:_NAMED]]
        if len(ranks) > _NAMED:
            said.append(f"and {len(ranks) - _NAMED} more ranks")
        step = self._module.trainer.global_step
        return (
            f"step {step}: the loss or a gradient is not finite (the norm of the loss and all "
            f"gradients is {float(norm)}): "
            f"{'; '.join(said)}."
        )


class MeshPrecision(Precision):
    """Runs the backward of a step of the mesh, and sends the gradients along a `GradientPath` where
    a plugin would clip those of one device.

    Attributes:
        before_update: Called right before an optimizer updates, after hooks and clipping.
        after_update: Called right after it, before hooks that follow.
    """

    before_update: Callable[[], None] | None = None
    after_update: Callable[[], None] | None = None

    given: Precision  # the plugin that was adopted, as the user made it
    gradients: GradientPath
    around_backward: Callable[[Tensor], AbstractContextManager[Tensor]]
    is_lightnings: bool

    def _in_hooks(self, names: Sequence[str], call: Callable[[], Any]) -> Any:
        with self.gradients.in_hooks(names, surely=not self.is_lightnings):
            # A plugin of somebody else's may do anything with gradients, as a hook may.
            around = None if self.is_lightnings else self.gradients.around_hook
            return call() if around is None else around(names[0], self, call)

    @override
    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.around_backward(tensor) as weighted:
            super().backward(weighted, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        with ExitStack() as stack:
            # Experts may be DTensors among plain tensors, and lists of both are stepped on at once.
            if self.gradients.mixes_kinds:
                stack.enter_context(implicit_replication())
                closure = partial(_outside, stack, closure)
            try:
                output = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            finally:  # as where the update raises an exception
                end_local_step(optimizer)
        if self.after_update is not None:
            self.after_update()
        return output

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        call = partial(super().post_backward, tensor, module)
        return cast(Tensor, self._in_hooks(("on_after_backward",), call))

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        hooks = "on_before_optimizer_step", "configure_gradient_clipping"
        self._in_hooks(hooks, partial(plain_after_closure, self, model, optimizer))
        if self.gradients.host is not None:
            self.gradients.host.finish_deferred()
        if self.before_update is not None:
            self.before_update()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.gradients.clip(list(self.main_params(optimizer)), clip_val, by_value=False)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.gradients.clip(list(self.main_params(optimizer)), clip_val, by_value=True)

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with self.gradients.norms.reads.paused_in_hooks():
            parameters = list(self.main_params(optimizer))
        self.gradients.before_step(parameters)
        try:
            getattr(super(), CLIP_GRADIENTS)(model, optimizer, *args, **kwargs)
        finally:
            self.gradients.end_step()


def _outside(stack: ExitStack, closure: Callable[[], Any]) -> Any:
    """Run the user's step, in which a mixture of both would be a mistake."""
    stack.close()
    output = closure()
    stack.enter_context(implicit_replication())
    return output


def mesh_precision(kind: type[Precision]) -> type[MeshPrecision]:
    """Return a subclass of a precision plugin's class whose clipping is that of a `GradientPath`.

    It keeps the name, by which checkpoints find the plugin's state.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    is_lightnings = kind.__module__.partition(".")[0] == "lightning"
    return type(kind.__name__, (MeshPrecision, kind), {**names, "is_lightnings": is_lightnings})


def _is_own(name: str, held: object, base: type) -> bool:
    """Return whether a hook is not that of the base class; Lightning's own way takes 7 us."""
    found = getattr(type(held), name, None)
    return name in vars(held) or found is not getattr(base, name, None)


def _reduce(copies: SharedGradients | ReplicatedGradients, _: _Passage) -> None:
    copies.reduce()


def _axes(group: dist.ProcessGroup, sizes: ParallelSizes) -> str:
    """Return the mesh axes along which the ranks of a group differ, as in ``pp x cp``."""
    places = [sizes.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
    return " x ".join(a for a in places[0] if len({place[a] for place in places}) > 1) or "one rank"


def _say(rank: str, loss: float | None, names: Sequence[str]) -> str:
    parts = [] if loss is None else [f"a loss of {loss}"]
    if names:
        more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
        parts.append(f"a gradient of {', '.join(names[:_NAMED])}{more} that is not finite")
    return f"{rank} has {' and '.join(parts)}"


@torch.no_grad()
def _nonfinite_names(
    named: Iterable[tuple[str, nn.Parameter]], on_host: Container[nn.Parameter]
) -> list[str]:
    found = []
    for name, parameter in named:
        grad = None if parameter.grad is None else local_part(parameter.grad)
        if parameter in on_host or (grad is not None and not bool(grad.isfinite().all())):
            found.append(name)
    return found
