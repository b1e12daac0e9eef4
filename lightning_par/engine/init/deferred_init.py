"""Deferred initialization that does not depend on the mesh: same seed, same weights.

A model is built with parameters on the meta device (`record_construction`), which costs no memory,
while how each parameter is initialized goes onto a tape. Then a rank makes the real values of those
parameters that it holds, one at a time and full-size, under a seed derived from (seed, name); it
cuts its own shard from them.

Buffers are real all along: ``torch.device("meta")`` would lose what constructors compute into them.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn import init
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_par.engine.init.construction_tape import ConstructionTape, TapeEntry, TensorView
from lightning_par.engine.rng import fork_torch_rng, seed_generators, seed_of
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.upstream.dispatch import operator_schema
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import make_subclass

__all__ = ["ConstructionRecord", "record_construction"]


class ConstructionRecord:
    """Record of how the parameters of a model are initialized; made by `record_construction`."""

    def __init__(self, held: Iterable[nn.Parameter] = ()) -> None:
        self._tape = ConstructionTape()
        self._twins = WeakIdKeyDictionary()
        for parameter in held:
            self._twins[parameter] = parameter
        self._views = WeakIdKeyDictionary()

    def knows(self, parameter: Tensor) -> bool:
        """Return whether the initialization of this parameter was recorded."""
        return parameter in self._views or self._tape.knows(parameter)

    def remember(self, module: nn.Module) -> None:
        """Keep knowing the parameters of `module` after a conversion such as ``module.to(dtype)``.

        Registered parameters are remembered by themselves; this is for copies that `copy.deepcopy`
        made.
        """
        for parameter in module.parameters():
            if self._tape.knows(parameter):
                self._views[parameter] = self._tape.view(parameter)

    def initialize(
        self,
        parameter: Tensor,
        *,
        name: str,
        seed: int,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the initial values of one parameter, whole.

        They are computed in the dtype of construction on `device`; the same device type gives the
        same values. The generators of torch are left as they were.

        Args:
            parameter: A meta parameter of a model built inside `record_construction`, of any shape.
            name: Its canonical FQN: for a tied parameter, the same one on every rank.
            seed: 0 or more; the seed of the run.
            device: Where the values are to be.
            dtype: Of the result; by default that of `parameter` now.

        Returns:
            A tensor of the shape of `parameter` that owns its memory, on the rank that calls.

        Raises:
            PlanError: The parameter was not recorded, was never initialized, or its initialization
                reads random values that the model also keeps in a real tensor.
        """
        if not self.knows(parameter):
            raise PlanError(
                "LP209",
                f"the parameter {name} of shape {tuple(parameter.shape)} was not made inside "
                "configure_model, so how it is initialized is not known. Make it inside "
                "configure_model.",
            )
        known = self._tape.knows(parameter)
        view = self._tape.view(parameter) if known else self._views[parameter]
        entries = self._tape.slice_of(view.buffer)
        self._check(name, parameter, view, entries)
        # On the device type of the run: generators of CPU and GPU draw other numbers.
        target = torch.device(device)
        with torch.no_grad(), fork_torch_rng(target), _default_dtype_restored():
            held = self._replay(entries, view.buffer, name, seed, target)
            value = view.of(held).to(dtype or parameter.dtype)
            # A view of a larger buffer would keep all of it in memory.
            whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
            return value if whole else value.clone()

    def _meta_twin(self, parameter: nn.Parameter, label: str) -> nn.Parameter:
        """Return the meta parameter in the place of `parameter`, the same one each time."""
        found: nn.Parameter | None = self._twins.get(parameter)
        if found is not None:
            return found
        with self._tape.paused(), torch.no_grad():
            # Adopted: real parameters become meta ones with the same history.
            twin, meta = parameter, self._tape.adopt(parameter, label)
            if not parameter.is_meta:
                twin = make_subclass(type(parameter), meta, parameter.requires_grad)
                twin.__dict__.update(parameter.__dict__)
            self._twins[parameter] = twin
            # A twin is its own twin, as ties register it again.
            self._twins[twin] = twin
            self._views[twin] = self._tape.view(twin)
            return twin

    def _check(
        self, name: str, parameter: Tensor, view: TensorView, entries: list[TapeEntry]
    ) -> None:
        constant = self._tape.constant(view.buffer) is not None
        made = [e for e in entries if view.buffer in e.writes]
        if not made and not constant:
            raise PlanError(
                "LP209",
                f"the parameter {name} was made on the meta device outside configure_model, so it "
                "has no initial values. Make it inside configure_model.",
            )
        # torch.empty gives what was in memory, which differs on every rank.
        if not constant and parameter.numel() and all(e.allocates for e in made):
            raise PlanError(
                "LP209",
                f"the parameter {name!r} is made with torch.empty(), and nothing sets its "
                f"{parameter.numel()} values, so they are undefined. Initialize the parameter "
                "where it is made, for example with nn.init.zeros_.",
            )
        if any(id(e) in self._tape.leaked for e in entries):
            raise PlanError(
                "LP209",
                f"the parameter {name} is initialized from random values that a buffer of the "
                "model also keeps. After configure_model the values of the parameter are drawn "
                "again, but those of the buffer are not, so the two would no longer agree. Draw "
                "the values of the parameter and of the buffer separately.",
            )

    def _replay(
        self, entries: list[TapeEntry], buffer: int, name: str, seed: int, device: torch.device
    ) -> Tensor:
        made: dict[int, Tensor] = {}
        # Every buffer is freed after its last use, so that one parameter at a time fits.
        # Place of the last entry that touches a buffer.
        last = {b: place for place, e in enumerate(entries) for b in e.reads | e.writes}
        for b in {buffer, *last}:
            constant = self._tape.constant(b)
            if constant is not None:
                made[b] = constant.to(device, copy=True)
        draws = 0
        for place, entry in enumerate(entries):
            if entry.random:
                shared = self._tape.shared.get(id(entry))
                # See Note [Seeds of draws].
                label = (name, draws) if shared is None else ("shared", shared)
                # Each draw anew, so that it does not depend on draws for other parameters.
                seed_generators(seed_of(seed, *label), device)
                draws += shared is None
            _run(entry, made, device, name)
            for b in entry.reads | entry.writes:
                if last[b] == place and b != buffer:
                    made.pop(b, None)
        return made[buffer]


def _run(entry: TapeEntry, made: dict[int, Tensor], device: torch.device, name: str) -> None:
    """Run one entry on `device`, on the buffers in `made`, and add the new ones to it."""

    def real(x: Any) -> Any:
        if isinstance(x, TensorView):
            if x.buffer not in made:
                raise PlanError(
                    "LP209",
                    f"the initialization of the parameter {name} reads a tensor on the meta "
                    "device that was made outside configure_model, so it has no values. Make this "
                    "tensor inside configure_model.",
                )
            return x.of(made[x.buffer])
        # A generator of the constructor's cannot be put back: draws follow the seed instead.
        return None if isinstance(x, torch.Generator) else x

    args, kwargs = map_leaves(real, entry.args), map_leaves(real, entry.kwargs)
    schema = operator_schema(entry.function) if hasattr(entry.function, "overloadpacket") else None
    if schema is not None and any(a.name == "device" for a in schema.arguments):
        # Pinned memory belongs to the CPU only.
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} | {"device": device}
    torch.set_default_dtype(entry.default_dtype)
    results = leaves_of(entry.function(*args, **kwargs))
    for view, result in zip(entry.outputs, results, strict=True):
        if view is None:
            continue
        # torch.empty gives what the memory held before; zeros are the same on every rank.
        if entry.allocates:
            result.zero_()
        # Later entries refer to the geometry that the constructor had.
        if result.stride() != view.stride or result.storage_offset() != view.offset:
            laid = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)
            result = laid.copy_(result)
        made[view.buffer] = result


@contextmanager
def _default_dtype_restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _SkippedInits(TorchFunctionMode):
    """Records the functions of `nn.init` that return at once on a meta tensor.

    In torch 2.13 `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` ask ``tensor.is_meta`` and
    leave. The question is caught, which also works where a model has imported the function by its
    name.
    """

    def __init__(self, tape: ConstructionTape) -> None:
        super().__init__()
        self._tape = tape
        # What `tensor.is_meta` arrives as in `__torch_function__`.
        self._asks_meta = inspect.getattr_static(Tensor, "is_meta").__get__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if result is True and func == self._asks_meta:
            frame: Any = sys._getframe(1)
            # Passed on by modes that the constructor has entered, such as a device.
            while frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            # Asked inside of nn.init, and nowhere else.
            if frame.f_globals is vars(init) and self._tape.knows(args[0]):
                self._record(frame.f_code, frame.f_locals)
        return result

    def _record(self, code: Any, values: dict[str, Any]) -> None:
        function = vars(init)[code.co_name]
        names = inspect.signature(function).parameters
        # The arguments as the function has them, from its frame.
        kwargs = {name: values[name] for name in names}
        written = [kwargs["tensor"]]
        with self._tape.paused():
            self._tape.record(function, (), kwargs, written=written, random=True)


def _registering(
    original: Callable[..., None], record: ConstructionRecord
) -> Callable[[nn.Module, str, nn.Parameter | None], None]:
    """Return a `register_parameter` that puts a meta parameter in the place of a real one."""
    # Other threads may build other models meanwhile.
    owner = threading.get_ident()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if not isinstance(param, nn.Parameter) or threading.get_ident() != owner:
            original(self, name, param)
            return
        # No leaf, or without a shape yet: nothing could be recorded of it.
        if param.grad_fn is not None or is_lazy(param):
            original(self, name, param)
            return
        # Subclasses that hold several tensors have no storage of their own.
        if not hasattr(param, "__tensor_flatten__"):
            param = record._meta_twin(param, f"{name!r} of {type(self).__name__}")
        original(self, name, param)

    return register_parameter


@contextmanager
def record_construction(held: Iterable[nn.Parameter] = ()) -> Iterator[ConstructionRecord]:
    """Build models inside without memory for parameters, and record how each one is initialized.

    Inside, a parameter becomes a meta tensor as a module registers it, buffers stay real, ties stay
    ties. The record is complete when the context is left. Other threads are not affected.

    Args:
        held: Parameters that a module has already. They stay real where they are tied to others.

    Raises:
        ConfigurationError: It is already active.
        PlanError: A constructor asks for values of a parameter (``.item()``, a real tensor from
            it).

    Examples:
        >>> with record_construction() as record:
        ...     layer = nn.Linear(3, 5)
        >>> record.initialize(layer.weight, name="weight", seed=1, device="cpu").shape
        torch.Size([5, 3])
    """
    original = nn.Module.register_parameter
    if getattr(original, "__module__", "") == __name__:
        raise ConfigurationError(
            "LP209",
            "record_construction() was entered while another record_construction() is active. "
            "Build the model inside one of them only.",
        )
    record = ConstructionRecord(held)
    replacement: Any = _registering(original, record)
    nn.Module.register_parameter = replacement  # type: ignore[method-assign]
    try:
        with _SkippedInits(record._tape), record._tape:
            yield record
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        record._tape.finish()
