"""The two forms of the user's module: parallel in a run, and whole and plain before and after it.

Note [Two forms]: parallelism changes a module in place: blocks become stubs, parameters become
shards, classes change and hooks are added. All of that is in the attributes and the classes of its
submodules. So both forms are sets of attributes of the same objects, which can be exchanged without
communication; only the values of whole parameters have to be gathered. What the user's code sets
meanwhile, in either form, stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import like_parameter
from lightning_par.engine.init.materialize import broadcast_values
from lightning_par.upstream.fsdp import attach_states, detach_states

__all__ = ["ModuleForms", "broadcast_state"]

_ABSENT: Final = object()
"""The value of an attribute that a form does not have."""


@dataclass(eq=False)
class _Attributes:
    """Attributes of a submodule, or the entries of a dict in them, such as its parameters.

    Attributes:
        target: The dict itself.
        names: Its keys in the whole form, in order.
        whole: What differs between the forms -> its value in the whole form.
        parallel: The same in the parallel form.
    """

    target: dict[Any, Any]
    names: Sequence[Any]
    whole: dict[Any, Any]
    parallel: dict[Any, Any]

    @classmethod
    def compare(cls, target: dict[Any, Any], before: Mapping[Any, Any]) -> "_Attributes":
        """Note what has changed since `before`."""
        names = dict.fromkeys([*before, *target])
        # By identity: equal tensors in two forms are not one.
        changed = [n for n in names if before.get(n, _ABSENT) is not target.get(n, _ABSENT)]
        return cls(
            target,
            list(before),
            {n: before.get(n, _ABSENT) for n in changed},
            {n: target.get(n, _ABSENT) for n in changed},
        )

    def exchange(self, shown: dict[Any, Any], hidden: dict[Any, Any]) -> None:
        """Show one form in the place of the other.

        Args:
            shown: `whole` or `parallel`.
            hidden: The other one.
        """
        # A copy: entries are exchanged one by one, and the order is restored below.
        now = dict(self.target)
        for name, value in hidden.items():
            current = now.get(name, _ABSENT)
            is_replaced = isinstance(current, Tensor) and isinstance(value, Tensor)
            if is_replaced:  # FSDP and optimizers may put others in their place
                hidden[name] = current
            # Otherwise the user's code has set it meanwhile, which stays.
            if current is value or is_replaced:
                now[name] = shown[name]
        # In the order of the whole form: that of parameters is what optimizers and checkpoints go
        # by.
        content = {name: now[name] for name in (*self.names, *now) if name in now}
        # The same dict: modules and hooks refer to it.
        self.target.clear()
        self.target.update({n: value for n, value in content.items() if value is not _ABSENT})


def _is_same(target: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether two dicts have the same keys in one order, and the same objects under them."""
    return (
        len(target) == len(before)
        # Not by `==`, which tensors as keys compare element by element.
        and all(map(is_, target, before))
        and all(map(is_, target.values(), before.values()))
    )


class ModuleForms:
    """Exchanges the whole and the parallel form of a module; see Note [Two forms].

    Made while the module is whole; `become_parallel` is called once it is on its mesh.

    Args:
        module: Whole module; its parameters may be on meta.

    Attributes:
        is_whole: Which form the module has.
        whole_bytes: Bytes of the parameters and buffers of the whole form.
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_whole = True
        self._module = module
        # All of the whole form, held: a pipeline drops blocks of other stages.
        self._submodules = list(module.modules())
        self._classes = [type(each) for each in self._submodules]
        self._parallel_classes = self._classes
        self._before = [
            (target, dict(target))
            for each in self._submodules
            # The attributes themselves, and the dicts in them (`_parameters`, `_modules`, hooks).
            for target in (vars(each), *(v for v in vars(each).values() if isinstance(v, dict)))
        ]
        self._tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors |= dict(module.named_buffers(remove_duplicate=False))
        # Tied ones once.
        distinct = {id(tensor): tensor for tensor in self._tensors.values()}
        self.whole_bytes = sum(tensor.nbytes for tensor in distinct.values())
        self._attributes: list[_Attributes] = []
        self._fsdp: dict[nn.Module, Any] = {}
        self._used: frozenset[int] = frozenset()

    def become_parallel(self) -> None:
        """Note what has changed, and give back the memory of whole parameters out of use."""
        # Most dicts of a module are empty, or as they were.
        compared = (_Attributes.compare(*each) for each in self._before if not _is_same(*each))
        self._attributes = [each for each in compared if each.whole]
        # It holds the whole parameters, whose memory is given back next.
        self._before.clear()
        self._parallel_classes = [type(each) for each in self._submodules]
        live = (*self._module.parameters(), *self._module.buffers())
        self._used = frozenset(map(id, live))
        self.free_whole()
        self.is_whole = False

    def free_whole(self) -> None:
        """Give back the memory of whole parameters that the parallel form does not use."""
        for tensor in self._tensors.values():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._used:
                # The object stays, for the whole form to come back to: the user may refer to it.
                tensor.data = tensor.data.new_empty(0)

    @property
    def needs_values(self) -> bool:
        """Whether some tensors of the whole form are not those of the parallel form."""
        return any(id(tensor) not in self._used for tensor in self._tensors.values())

    def show_whole(
        self, state: Mapping[str, Any], trains: Mapping[str, bool] | None = None
    ) -> None:
        """Give the module its whole form.

        Args:
            state: FQN -> whole tensor, for every parameter and persistent buffer; empty where no
                value is needed.
            trains: FQN -> `requires_grad` of parameters, which the run may have changed.
        """
        self._exchange(whole=True)
        devices = {t.device for t in self._tensors.values() if id(t) in self._used}
        # Where tensors that both forms share are.
        device = next(iter(devices), torch.device("cpu"))
        made: dict[int, nn.Parameter] = {}
        for name, tensor in self._tensors.items():
            if id(tensor) in self._used or name not in state:
                continue
            value = state[name].to(device)
            if not isinstance(tensor, nn.Parameter):
                tensor.data = value
            # `.data` of a meta tensor cannot become one of a device: it needs a new object.
            elif tensor.is_meta:
                if id(tensor) not in made:
                    made[id(tensor)] = like_parameter(tensor, value)
                self._tensors[name] = made[id(tensor)]
            else:
                tensor.data = value
        for name, flag in (trains or {}).items():
            if name in self._tensors:
                self._tensors[name].requires_grad_(flag)
        # Under each name: tied ones get the same new parameter.
        for submodule in self._submodules:
            for key, parameter in submodule._parameters.items():
                if parameter is not None and id(parameter) in made:
                    submodule._parameters[key] = made[id(parameter)]

    def show_parallel(self) -> None:
        """Give the module its parallel form, with the values that it had then."""
        self._exchange(whole=False)

    def _exchange(self, *, whole: bool) -> None:
        if whole:
            # Before the classes change back: FSDP2 knows its modules beside their attributes.
            self._fsdp = detach_states(self._submodules)
        for attributes in self._attributes:
            forms = attributes.whole, attributes.parallel
            attributes.exchange(*(forms if whole else forms[::-1]))
        # FSDP2 and stubs give a module another class.
        kinds = self._classes if whole else self._parallel_classes
        for submodule, kind in zip(self._submodules, kinds, strict=True):
            if type(submodule) is not kind:
                submodule.__class__ = kind
        if not whole:
            attach_states(self._fsdp)
        self.is_whole = whole


def broadcast_state(
    state: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Any]:
    """Return the state dict that rank 0 gives on every rank, on the CPU.

    Args:
        state: On rank 0: FQN -> tensor or another value; elsewhere it is not used.
        group: All ranks; None: the default group.
        device: Device that the process group can send from.

    **Communicates**: an object, then the tensors, small ones together.
    """
    is_source = dist.get_rank() == 0
    described = {
        # Shapes go first, so that every rank can make room.
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    box: list[Any] = [described if is_source else None]
    dist.broadcast_object_list(box, 0, group=group)
    found = {
        name: torch.empty(about[0], dtype=about[1]) if isinstance(about, tuple) else about
        for name, about in box[0].items()
    }
    if is_source:
        found = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in state.items()}
    # In the order of the dict, which the object has given all ranks.
    broadcast_values((v for v in found.values() if isinstance(v, Tensor)), device, group)
    return found
