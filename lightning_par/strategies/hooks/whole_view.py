"""What code of a user's outside of the steps sees of a divided module.

Note [Whole view]: a hook between two steps takes norms of weights, averages them into a shadow,
adds noise, saves them; one before a step does so with gradients. All ranks run it alike, as one
process would, so inside of it

- a module lists the parameters of all pipeline stages. One of another stage has a shape and no
  value, and so has what is computed from it. Such values belong to that stage: only its ranks
  compute them, without messages;
- where values of several stages meet, or a value becomes a number, an array or a file, it is sent
  to all ranks. So a result with one entry, such as a norm, is a plain tensor everywhere;
- a plain tensor and a DTensor may meet, as for a shadow made before the module was divided.

Ranks that ask for different things are refused: whenever stages exchange values, and in the first
run of each hook.

Length: what a function of torch means for parts depends on all kinds of functions.
"""

import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_par.dtensor import whole
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.hooks.innermost_mode import asks_innermost, without_mode
from lightning_par.strategies.hooks.mixed_tensors import (
    entry,
    first,
    is_masked,
    is_number,
    refused_hook,
    run,
    SET_DATA,
    told,
)
from lightning_par.strategies.hooks.slices import is_slice
from lightning_par.strategies.hooks.whole_groups import WholeGroups
from lightning_par.strategies.step.absent_parameter import (
    About,
    absent_parameter,
    AbsentParameter,
    END_OF_HOOK,
    Refusals,
    user_line,
)
from lightning_par.upstream.dispatch import FakeTensorMode
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import mark_as_parameter, written_by

__all__ = ["WholeView"]

_STAGE = "_lightning_par_stage"
"""Attribute of a tensor, for which torch asks before it is saved, and of its memory, so that views
and parameters made of it have it, too: the run, and the pipeline rank to which it belongs.
"""
_TENSOR: Any = Tensor
_GRAD, _SET_GRAD, _DATA = _TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.data.__get__


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TELLS = _names(
    "dim size numel nelement element_size stride storage_offset is_contiguous is_floating_point "
    "is_complex data_ptr get_device __len__ __hash__ requires_grad_ retain_grad untyped_storage "
    "ndimension type register_hook register_post_accumulate_grad_hook"
)
_HOOKS = _names("register_hook register_post_accumulate_grad_hook")
_TO_PYTHON = _names(
    "item tolist numpy __array__ __float__ __int__ __bool__ __index__ __complex__ __format__ "
    "__repr__ __reduce_ex__ __contains__ is_nonzero equal allclose nonzero argwhere masked_select "
    "unique unique_consecutive isin histc histogram bincount"
)
"""Functions whose result is no tensor, or has a shape that depends on values."""
_ALIASES = _names("detach view view_as squeeze select __getitem__ alias expand")
_LIKE = _names("type_as to expand_as view_as reshape_as")
"""Functions that take from further tensors their shape or dtype, and no value."""
_DRAWS = _names("rand_like randn_like randint_like")
_DRAWS_BY_VALUES = _names("bernoulli multinomial normal poisson binomial dropout alpha_dropout")
_DRAWS_IN_PLACE = _names(
    "normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_"
)
_CURE = (
    "Every rank has to make the same calls in the same order, since each rank holds only a part of "
    "the weights. Make the calls named here on every rank, outside of `if trainer.is_global_zero`, "
    "and print or write the result on one rank. Such calls are reading a weight, a forward of the "
    "model, save_checkpoint, trainer.strategy.full_parameter(name) and "
    "trainer.strategy.gather_state_dict(). A logger writes on rank 0 only: compute arrays on every "
    "rank (p.detach().numpy(), p.grad.numpy()), and log them on rank 0. Loop over "
    "module.named_parameters(), which has the same order on all ranks."
)


class WholeView(TorchFunctionMode):
    """Lets hooks of a user's see the whole of a divided module; see Note [Whole view].

    Args:
        module: The user's LightningModule on this rank.
        known: What is known of the tensors of all stages, by their names.
        mesh: Mesh of this run.
        device: Device of this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        known: Mapping[str, About],
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._module, self._known, self._device = module, known, device
        self.group = mesh.group("pp") if mesh.sizes.pipeline > 1 else None
        self.place = mesh.place["pp"] if self.group is not None else 0
        self._averages = mesh.token_group.size() > 1  # plain gradients, after the backward
        self._owners = {} if self.group is None else self._find_owners(self.group)
        self._handles: dict[str, AbsentParameter] = {}
        self._held: dict[int, int] | None = {}
        self._grads: dict[str, Tensor | None] | None = None
        self._hook, self._is_first, self._is_paused = "", False, True
        self._groups = WholeGroups((), self)
        self._run = uuid.uuid4().hex
        self._fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)

    def _find_owners(self, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the first pipeline rank of each tensor that some stages lack."""
        own = [*self._parameters()], [name for name, _ in self._module.named_buffers()]
        found = [own] * group.size()
        dist.all_gather_object(found, own, group=group)
        # Where a stage lacks a parameter of a module that it holds, a buffer stands in its place.
        parameters = {name for names, _ in found for name in names}
        held = [{*names, *set(buffers).difference(parameters)} for names, buffers in found]
        owners: dict[str, int] = {}
        # Backwards, so that of several stages the first one owns it.
        for rank, names in reversed([*enumerate(held)]):
            owners |= dict.fromkeys(names, rank)
        everywhere = set.intersection(*held)
        return {name: rank for name, rank in owners.items() if name not in everywhere}

    def _parameters(self) -> dict[str, Tensor]:
        """Return the parameters of this rank, by the first names of tied ones."""
        named = self._module.named_parameters(remove_duplicate=False)
        return {self._first(name): parameter for name, parameter in named}

    def _first(self, name: str) -> str:
        about = self._known.get(name)
        return name if about is None else about.name

    @contextmanager
    def around(
        self, hook: str, optimizers: Iterable[Optimizer], *, is_first: bool
    ) -> Iterator[None]:
        """Surrounds a hook.

        Args:
            hook: Its name, for messages.
            optimizers: Those of this rank.
            is_first: Whether it runs for the first time, or is compared in every run.

        Raises:
            ConfigurationError: On every rank, where ranks ask for different things.

        **Communicates**: what the hook needs; in its first run a number at each exchange, over all
        ranks.
        """
        self._hook, self._is_first, self._is_paused = hook, is_first, False
        self._groups = WholeGroups(optimizers, self)
        self._groups.show()
        self._held = None if self._owners else {}
        try:
            with replaced(DTensor, "numpy", Tensor.numpy), self:  # refused elsewhere
                yield
            # A rank that asked for less than others meets them here, and not in the next
            # collective.
            self._agree(END_OF_HOOK, None)
        finally:
            self._groups.hide()
            self._is_paused, self._grads, self._held = True, None, {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, tensors are those of this rank."""
        if self._is_paused:
            yield
            return
        self._is_paused = True
        self._groups.hide()
        try:
            with without_mode(self):
                yield
        finally:
            self._is_paused = False
            self._groups.show()

    def agree(self, what: str) -> None:
        """Refuse what some stages do not do, and in the first run of the hook some ranks.

        Args:
            what: What this rank is about to do.
        """
        self._agree(what, self.group)

    @property
    def is_on(self) -> bool:
        """Whether a hook is at work, and does not call this package."""
        return not self._is_paused

    def absent(self, about: About) -> Tensor:
        """Return what stands for a tensor of another stage: always the same."""
        made = self._handles.get(about.name)
        if made is None:
            # In a rehearsal other stages do not answer, and nobody asks for values.
            stage = self._owners.get(about.name, -1)
            # `setdefault`: the first tensor of a hook lists all parameters, this one among them.
            made = self._handles.setdefault(about.name, self.stand_for(about, stage))
            if not about.is_buffer:
                # Not a class of parameters, as what is detached would be one, too.
                mark_as_parameter(made)
        return made

    def is_of_a_stage(self, tensor: Tensor) -> bool:
        """Return whether one stage alone has the values of a tensor."""
        return self._stage_of(tensor) is not None

    def values(self, tree: Any) -> Any:
        """Return a nest with whole, plain tensors in the place of those of parts.

        **Communicates**: their values.
        """
        return map_leaves(self._value_of, tree)

    def parameters_here(self) -> dict[str, Tensor]:
        """Return what this stage has to give to others."""
        named = self._parameters().items()
        return {name: p for name, p in named if self._owners.get(name) == self.place}

    def own(self, name: str, value: Any) -> None:
        """Note of what a state dict made outside of the hook holds to which stage it belongs."""
        self._tagged(value, self._owners.get(self._first(name)))

    def stand_for(self, about: About, stage: int) -> AbsentParameter:
        """Return what stands for a tensor of another stage."""
        made = absent_parameter(about, self._device, Refusals(waits=False))
        vars(made)[_STAGE] = self._run, stage
        return made

    def _own_tensors(self) -> dict[int, int]:
        """Return the stage of each tensor that this rank holds and some stages lack, by `id`.

        Looked for when the code of a hook uses its first tensor: most hooks use none.
        """
        if self._held is None:
            self._held = {}  # meanwhile, as lists of parameters hash these
            named, owners = dict(self._module.named_buffers()) | self._parameters(), self._owners
            # What stands for a tensor of another stage has a mark of its own.
            here = {n: t for n, t in named.items() if not isinstance(t, AbsentParameter)}
            of_stages = [
                (tensor, owners[n])
                for n, tensor in here.items()
                if n in owners and _is_as_known(tensor, self._known.get(n))
            ]
            for tensor, stage in of_stages:
                # For `nn.Parameter(w)`, which asks no mode, and gives the same memory.
                if (memory := _marked(tensor)) is not tensor:
                    vars(memory)[_STAGE] = self._run, stage
            # States of a parameter that all stages hold are of none, as it is itself.
            stages = {id(p): owners.get(n) for n, p in named.items()}
            states = ((s, stages.get(id(p), self.place)) for p, s in self._groups.states())
            self._held = {id(s): stage for s, stage in states if stage is not None}
            self._held |= {id(tensor): stage for tensor, stage in of_stages}
        return self._held

    def _stage_of(self, tensor: Any) -> int | None:
        """Return the pipeline rank to which a tensor belongs; None: all have it."""
        if self.group is None:
            return None
        held = self._own_tensors().get(id(tensor))
        # Its own tensors by identity: these live longer than the hook.
        if held is not None:
            return held
        run, stage = vars(_marked(tensor)).get(_STAGE, ("", None))
        return stage if run == self._run else None

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, DTensor) or (
            isinstance(value, Tensor) and (is_slice(value) or self._stage_of(value) is not None)
        )

    def _value_of(self, tensor: Any) -> Any:
        """Return the whole of a tensor, on every rank."""
        if not self._is_part(tensor):
            return tensor
        stage, value = self._stage_of(tensor), None
        of = "" if stage is None else f" of stage {stage}"
        self._agree(f"reading a tensor of shape {tuple(tensor.shape)}{of}", self.group)
        # `whole` communicates over the ranks of the stage alone.
        if stage is None or stage == self.place:
            value = whole(tensor.detach()).detach()
        if stage is None:
            return value
        assert self.group is not None
        if value is None:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        else:
            value = value.contiguous().clone()
        dist.broadcast(value, dist.get_global_rank(self.group, stage), group=self.group)
        return value

    def _agree(self, what: str, group: dist.ProcessGroup | None) -> None:
        """Refuse ranks that ask for different things.

        Args:
            what: What this rank asks for.
            group: Ranks that exchange it in every run of the hook; None: in the first alone.
        """
        if self._is_first:
            group = dist.group.WORLD
        if group is None:
            return
        number = zlib.crc32(what.encode())
        found = torch.tensor([number, -number])
        # Reached by all ranks of the group, whatever each asks for: that is what is compared.
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        if int(found[0]) == -int(found[1]):
            return
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, f"{what}{user_line()}", group=group)
        ranks = dist.get_process_group_ranks(group)
        said = "; ".join(f"rank {r}: {t}" for r, t in zip(ranks, told, strict=True))
        raise ConfigurationError(
            "LP415",
            f"{self._hook}: ranks wait for each other in different calls ({said}). {_CURE}",
        )

    def _gradient(self, parameter: Tensor) -> Any:
        """Return the gradient of a parameter that one stage has."""
        if self._grads is None:
            self._grads = self._find_gradients()
        if not isinstance(parameter, AbsentParameter):
            found = _GRAD(parameter)
            return self._tagged(found, self._stage_of(parameter))
        return self._grads.get(parameter.fqn)

    def _find_gradients(self) -> dict[str, Tensor | None]:
        """Return what stands for the gradients that other stages have.

        **Communicates**: a number for each parameter, over the ``pp`` axis.
        """
        assert self.group is not None
        self._agree("gradients", self.group)
        names, named = [*self._owners], self._parameters()
        held = [n in named and _GRAD(named[n]) is not None for n in names]
        flags = torch.tensor(held, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        found: dict[str, Tensor | None] = {}
        for name, handle in self._handles.items():
            found[name] = None
            if flags[names.index(name)]:
                stage = self._owners[name]
                about = About(f"{name}.grad", tuple(handle.shape), handle.dtype)
                found[name] = self.stand_for(about, stage)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on every rank that has its values; see Note [Whole view]."""
        kwargs = dict(kwargs or {})
        if asks_innermost(func):
            return args[0] is self
        if not args and "tensor" in kwargs:  # as functions of torch.nn.init hand it on
            args = (kwargs.pop("tensor"),)
        if self._is_paused:
            return func(*args, **kwargs)
        parts = [t for t in leaves_of((args, kwargs)) if self._is_part(t)]
        name = getattr(func, "__name__", "")
        if name in _LIKE and parts and not self._is_part(args[0]):
            args, parts = (args[0], *map_leaves(self._like, args[1:])), []
        if not parts:
            if self._averages and name in _HOOKS and isinstance(args[0], nn.Parameter):
                raise refused_hook(
                    f"{name}(...){user_line()} registers a hook on a weight. The hook would get "
                    "the gradient of a part of the batch, which is not averaged over the ranks yet"
                )
            return func(*args, **kwargs)
        if name in _TELLS or (name == "__get__" and func not in (_DATA, _GRAD)):
            return told(func, name, args, kwargs)
        if func == _GRAD:
            return func(*args) if self._stage_of(args[0]) is None else self._gradient(args[0])
        if name == "__set__" and func != SET_DATA:
            return self._set(func, args)
        if name.startswith("_foreach_"):
            return self._each(func, args, kwargs)
        if name == "__iter__":
            return iter(self._again(torch.unbind, args[0]))
        if name == "__deepcopy__":
            return self._copied(*args)
        return self._call(func, name, args, kwargs, parts)

    def _copied(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        stage = self._stage_of(tensor)
        if not isinstance(tensor, AbsentParameter):
            return self._tagged(_TENSOR.__deepcopy__(tensor, memo), stage)
        if id(tensor) not in memo:
            made = self._imagine(Tensor.clone, (tensor,), {}, stage or 0, [tensor])
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                mark_as_parameter(made)
        return memo[id(tensor)]

    def _like(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty((), dtype=value.dtype, device=self._device).expand(value.shape)

    def _again(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), args, kwargs)

    def _set(self, func: Any, args: Any) -> Any:
        """Set a property, as ``.grad``; that of a parameter of another stage is only noted."""
        target = args[0]
        if isinstance(target, AbsentParameter):
            if func == _SET_GRAD and self._grads is not None:
                self._grads[target.fqn] = args[1]
            elif func != _SET_GRAD:
                told(func, "", args, {})
            return None
        return func(*args)

    def _each(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on lists entry by entry: entries belong to different stages."""
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
        count = len(lists[0])
        out = []
        for i in range(count):
            given = {name: entry(a, i, count) for name, a in kwargs.items()}
            found = self._again_each(func, [entry(a, i, count) for a in args], given)
            out += list(found or ())
        return tuple(out) if out else None

    def _again_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        parts = [t for t in leaves_of((args, kwargs)) if self._is_part(t)]
        return self._call(func, func.__name__, args, kwargs, parts)

    def _call(
        self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any], parts: list[Tensor]
    ) -> Any:
        target = written_by(name, args, kwargs)
        stages = {stage for t in parts if (stage := self._stage_of(t)) is not None}
        # Whole on every rank, so that all generators move alike, as one process's does.
        if getattr(func, "__module__", "") == "torch.nn.init":  # which needs no gradient
            with torch.no_grad():
                return self._draw(func, name, args, kwargs)
        if name == "equal" and len({t.shape for t in leaves_of((args, kwargs))}) > 1:
            return False  # as `BaseFinetuning` compares each pair of weights
        if name in _DRAWS or name in _DRAWS_IN_PLACE:
            return self._draw(func, name, args, kwargs)
        # A number or a shape that depends on values: every rank needs the values.
        if name in _TO_PYTHON | _DRAWS_BY_VALUES or is_masked(name, args):
            args, kwargs = self.values((args, kwargs))
            return func(*args, **kwargs)
        # A tensor that all ranks have is written to by all: they need the other values, too.
        if target is not None and not self._is_part(target):
            args, kwargs = self._others(target, args, kwargs)
            return func(*args, **kwargs)
        # No stage alone has what it takes.
        if len(stages) > 1:
            args, kwargs = self._others(target, args, kwargs)
            if target is None:
                return func(*args, **kwargs)
            own = self._stage_of(target)
            stages = set() if own is None else {own}
        if not stages:
            return self._finish(run(func, target, args, kwargs), name, target, parts, None)
        (stage,) = stages
        if stage == self.place or not any(isinstance(t, AbsentParameter) for t in parts):
            out = run(func, target, args, kwargs)
        # What is written belongs to another stage, whose ranks write it.
        elif target is not None:
            return args[0] if target is first(args) else target
        else:
            out = self._imagine(func, args, kwargs, stage, parts)
        return self._finish(out, name, target, parts, stage)

    def _others(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return arguments with values in the place of parts, but for what is written to."""
        return map_leaves(lambda t: t if t is target else self._value_of(t), (args, kwargs))

    def _draw(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Draw random numbers for the whole of a tensor, on every rank."""
        like = args[0]
        # A stage that draws for its own modules alone would draw other numbers than one process.
        self._agree(f"{name} for {tuple(like.shape)} of stage {self._stage_of(like)}", None)
        # In the shape of the whole: a shard would draw fewer numbers than one process.
        plain = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        drawn = func(plain, *self.values(args[1:]), **self.values(kwargs))
        if name in _DRAWS:
            return drawn
        self._again(Tensor.copy_, like, drawn)
        return like

    def _imagine(self, func: Any, args: Any, kwargs: Any, stage: int, parts: list[Tensor]) -> Any:
        """Return what stands for the result of a function that another stage runs."""

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=self._device)

        fqn = next(t.fqn for t in parts if isinstance(t, AbsentParameter))
        with self._fakes, torch.no_grad():
            args, kwargs = map_leaves(fake, (args, kwargs))
            out = func(*args, **kwargs)

        def stand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return self.stand_for(About(fqn, tuple(value.shape), value.dtype), stage)

        return map_leaves(stand, out)

    def _tagged(self, value: Any, stage: int | None) -> Any:
        if isinstance(value, Tensor) and stage is not None and id(value) not in self._own_tensors():
            vars(_marked(value))[_STAGE] = vars(value)[_STAGE] = self._run, stage
        return value

    def _finish(
        self, out: Any, name: str, target: Any, parts: Iterable[Tensor], stage: int | None
    ) -> Any:
        """Note to which stage a result belongs; give one with a single entry to all."""
        if target is not None:
            return out
        out = map_leaves(lambda value: self._tagged(value, stage), out)
        reduces = name not in _ALIASES and name != "__get__" and any(t.ndim for t in parts)
        return map_leaves(lambda v: self._value_of(v) if reduces and is_number(v) else v, out)


def _is_as_known(tensor: Tensor, about: About | None) -> bool:
    """Whether a tensor is what other stages expect: a hook may have bound a buffer anew."""
    if about is None or isinstance(tensor, nn.Parameter):
        return True
    return tensor.shape == about.shape and tensor.dtype == about.dtype


def _marked(tensor: Tensor) -> Any:
    """Return what can be marked: the memory of a tensor that has its own."""
    is_plain = not isinstance(tensor, DTensor | AbsentParameter) and tensor.layout is torch.strided
    return tensor.untyped_storage() if is_plain else tensor
