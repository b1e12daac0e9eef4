"""The dispatcher: modes that see every operator, its schemas, and kernels put into libraries.

=================================  ============================================================
`TorchDispatchMode`                base class of a context that gets every operator call. Its
                                   module is private although torch's notes tell users to derive
                                   from it; `TorchFunctionMode`, which is public, sees functions
                                   before they are decomposed
`item_operator`                    what ``.item()`` calls; public names end before the dispatcher
`any_true_operator`                what anomaly detection calls; it has no public name
`count_of_modes`                   how many dispatch modes are on; nothing public tells
`FakeTensorMode`                   context in which operators compute shapes and no values; torch's
                                   notes on fake tensors tell to import it from there
=================================  ============================================================
"""

from typing import Any

import torch
from torch.library import Library

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    item_operator = torch.ops.aten._local_scalar_dense.default
    any_true_operator = torch.ops.aten._is_any_true.default
    count_of_modes = torch._C._len_torch_dispatch_stack
    _LAZY = torch._C.DispatchKeySet(torch._C.DispatchKey.Lazy)
    _destroy = Library._destroy

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "any_true_operator",
    "count_of_modes",
    "is_composite",
    "item_operator",
    "lazy_keys",
    "operator_schema",
    "remove_kernels",
]


def operator_schema(operator: Any) -> Any:
    """Return the arguments and returns of an operator, and which of them it writes to.

    `torch.library.infer_schema`, which is public, is for functions that are not operators yet.
    """
    with names_of("torch"):
        return operator._schema


def is_composite(operator: Any) -> bool:
    """Return whether an operator only calls others: it may be decomposed, and has no kernel.

    Some have both, such as ``silu_backward``; torch runs the kernel. Operators of TorchScript, such
    as ``prim.device`` of a tensor without memory, are unknown to the dispatcher.
    """
    if operator.namespace == "prim":
        return False
    has_kernel = operator.has_kernel_for_dispatch_key
    return not has_kernel("CPU") and has_kernel("CompositeImplicitAutograd")


def lazy_keys() -> Any:
    """Return the dispatch key set of the Lazy backend, for `OpOverload.redispatch`.

    Dispatch keys have no public name.
    """
    return _LAZY


def remove_kernels(library: Library) -> None:
    """Take the kernels of `library` back at once.

    torch does so by itself when the library is collected, which nobody can wait for.
    """
    _destroy(library)  # type: ignore[no-untyped-call]
