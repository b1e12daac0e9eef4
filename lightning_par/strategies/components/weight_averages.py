"""Averages of weights that Lightning's callbacks keep: on a mesh, each rank averages its own parts.

`WeightAveraging` and `StochasticWeightAveraging` copy the whole module in their `setup`, before it
is sharded. So that `setup` is called later, once the module is on its mesh, with `WeightParts` in
the place of the module, and then what reads a checkpoint; all the rest is Lightning's own code.

Note [Local states]: what the callbacks put into a checkpoint are states of this rank's parts. The
saver replaces them by those of the whole model; before the callbacks read a checkpoint, the loader
replaces the whole ones by this rank's parts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_par.dtensor import like_parameter, local_part
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.setup.averaging_checks import averaging_callbacks
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = [
    "LocalWeights",
    "defer_averages",
    "load_averages",
    "make_averages",
]

_DEFERRED = "setup", "on_load_checkpoint", "load_state_dict"
_CURRENT = "current_model_state"
"""Key of a checkpoint under which `WeightAveraging` keeps the weights that are trained."""
_SWA_STATE = "average_model_state"
"""Key under which `StochasticWeightAveraging` keeps the average in its own state."""


class LocalWeights(dict[str, Any]):
    """State dict of a module's part on this rank; see Note [Local states]."""


class WeightParts(pl.LightningModule):
    """Copies of the parameters and buffers of this rank, under the same names and in the same
    order; DTensors stay sharded.

    It is a LightningModule as the callbacks ask for one; a module of FSDP cannot be copied.

    Args:
        module: The user's module on its mesh, with parameters that are not gathered.
        settle: Called before weights are read or exchanged: makes the parameters of the module
            those that the optimizer holds.
    """

    def __init__(self, module: pl.LightningModule, settle: Callable[[], None]) -> None:
        super().__init__()
        self._root_device, self._settle = module.device, settle
        # Named so on the copies as well: `state_dict` must have the same keys.
        persistent = module.state_dict().keys()
        copies: dict[int, Any] = {}
        # All modules come first: those without parameters give buffers their place, too.
        for name, _ in module.named_modules(remove_duplicate=False):
            if name:
                self._owner(name).add_module(name.rpartition(".")[2], nn.Module())
        for name, p in module.named_parameters(remove_duplicate=False):
            # Tied ones stay tied.
            if id(p) not in copies:
                copies[id(p)] = like_parameter(p, p.detach().clone())
            self._owner(name).register_parameter(name.rpartition(".")[2], copies[id(p)])
        for name, b in module.named_buffers(remove_duplicate=False):
            copy = copies.setdefault(id(b), b.detach().clone())
            own = name.rpartition(".")[2]
            self._owner(name).register_buffer(own, copy, persistent=name in persistent)

    def _owner(self, name: str) -> nn.Module:
        return self.get_submodule(name.rpartition(".")[0])

    @property
    def device(self) -> torch.device:
        """Device of the user's module."""
        return self._root_device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters; those of the user's module may be read until its next step.

        The callbacks call this before they read those of the module.
        """
        self._settle()
        return super().parameters(recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state dict that says that it is of a part."""
        return LocalWeights(super().state_dict(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightParts":
        """Return these copies themselves, which are made for one callback."""
        return self


class _LocalAverage(AveragedModel):
    """Averages DTensors, or, where torch takes all weights in one list, their local parts: an
    operation on a list does not take DTensors of several meshes, or some that are none.
    """

    def update_parameters(self, model: nn.Module) -> None:
        """Average as torch does."""
        if self.avg_fn is not None:
            # Torch's function reads them without `parameters()` of ours.
            self.module.parameters()  # settles them
            super().update_parameters(model)
            return
        parts = self.module
        # Same memory: what torch averages into it is in the parts.
        self.module = _local_tensors(parts)
        try:
            super().update_parameters(_local_tensors(model))
        finally:
            self.module = parts


def _local_tensors(module: nn.Module) -> nn.Module:
    """Return a module with the local parts of all parameters and buffers, in the same memory."""
    found = nn.Module()
    for i, p in enumerate(module.parameters()):
        found.register_parameter(f"parameter_{i}", nn.Parameter(local_part(p), requires_grad=False))
    for i, b in enumerate(module.buffers()):
        found.register_buffer(f"buffer_{i}", local_part(b))
    return found


def defer_averages(trainer: pl.Trainer) -> None:
    """Let `setup` of averaging callbacks do nothing until `make_averages`, and what reads a
    checkpoint nothing until `load_averages`; on one device they find the module whole.
    """
    for callback in averaging_callbacks(trainer) if trainer.world_size > 1 else ():
        # On the object, which hides the methods of its class.
        vars(callback).update(dict.fromkeys(_DEFERRED, lambda *_, **__: None))


def make_averages(trainer: pl.Trainer, model: ParallelModel) -> None:
    """Call the deferred `setup` of averaging callbacks, which then hold parts of averages.

    Args:
        trainer: The user's Trainer.
        model: The model on its mesh.
    """
    for callback in averaging_callbacks(trainer):
        # `load_averages` comes after this, and calls the others itself.
        # One that was not deferred: one device, or a second call.
        if _DEFERRED[0] not in vars(callback):
            continue
        for name in _DEFERRED:
            del vars(callback)[name]
        # Copies are made of shards.
        _settle(model)
        parts = WeightParts(model.module, partial(_settle, model))
        earlier = _average_of(callback)
        callback.setup(trainer, parts, trainer.state.fn)  # type: ignore[arg-type]
        average = _average_of(callback)
        if average is None:
            continue
        # The callback kept its average, so that its `setup` made none.
        if average is earlier:  # an evaluation after a fit
            state = average.module.state_dict()
            if isinstance(state, LocalWeights):
                parts.load_state_dict(state)
            else:
                model.states.load_weights(parts, state, strict=True)
            average.module = parts
        # Lightning makes the object; only how it averages has to differ.
        average.__class__ = _LocalAverage


def _average_of(callback: Callback) -> AveragedModel | None:
    held = vars(callback).values()
    return next((value for value in held if isinstance(value, AveragedModel)), None)


def _settle(model: ParallelModel) -> None:
    if model.forms.is_whole:
        raise ConfigurationError(
            "LP611",
            "the weight-averaging callback still holds the sharded average of an earlier run. Use "
            "a new callback, or use the Trainer of that run again.",
        )
    model.sharding.release()


def load_averages(model: ParallelModel, checkpoint: dict[str, Any], weights: Any) -> None:
    """Let averaging callbacks load the states of this rank's parts, if that was deferred.

    Args:
        model: The model on its mesh, which has loaded its weights.
        checkpoint: What was read; changed in place.
        weights: State dict of the whole model that was loaded.

    Raises:
        CheckpointError: Names or shapes differ from those of the model.
    """
    module, states = model.module, model.states
    trainer, found = module.trainer, checkpoint.get("callbacks")
    callbacks = averaging_callbacks(trainer)
    if trainer.world_size == 1 or found is None or not callbacks:
        return

    def local(state: Any) -> LocalWeights:
        # As large as the rank's part: no rank holds a whole average.
        parts = WeightParts(module, lambda: None)
        states.load_weights(parts, state, strict=True)
        return LocalWeights(parts.state_dict())

    if any(isinstance(callback, WeightAveraging) for callback in callbacks):
        checkpoint["state_dict"] = local(weights)
        # The trained weights are apart: "state_dict" held the average.
        if _CURRENT in checkpoint:
            states.load_weights(module, checkpoint[_CURRENT], strict=True)
            checkpoint[_CURRENT] = LocalWeights(module.state_dict())
    for callback in callbacks:
        # What Lightning's own call found deferred.
        callback.on_load_checkpoint(trainer, module, checkpoint)
        state = found.get(callback.state_key)
        if state:
            average = state.get(_SWA_STATE)
            more = {} if average is None else {_SWA_STATE: local(average)}
            callback.load_state_dict({**state, **more})
