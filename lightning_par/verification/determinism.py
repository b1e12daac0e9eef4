"""Float64 that stays float64 in code that computes parts in float32.

Many models compute norms, softmaxes or the loss in float32 whatever their dtype is. Two layouts
that add in another order then differ by the rounding of float32, 1e-7, which hides small mistakes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["DoublePrecision"]


class DoublePrecision(TorchFunctionMode):
    """Inside, a float64 tensor that is asked to become float32 stays float64.

    Only for comparing layouts: the same on both sides, it changes what is computed by the rounding
    of float32.

    Example:
        >>> with DoublePrecision():
        ...     torch.zeros(1, dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keep the dtype where the first argument is float64."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                func = Tensor.double
            args = [torch.float64 if a is torch.float32 else a for a in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
