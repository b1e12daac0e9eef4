"""Dropout that does nothing, so that runs on different layouts can be compared number by number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDropout"]

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


class WithoutDropout(TorchFunctionMode):
    """Inside, the functions of dropout give their input back.

    Attributes:
        calls: How many would have changed something.

    Example:
        >>> with WithoutDropout() as still:
        ...     F.dropout(torch.ones(2), 0.5).tolist()
        [1.0, 1.0]
        >>> still.calls
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass over dropout."""
        options = dict(kwargs or {})
        if func in _DROPOUTS:
            options = {"x" if name == "input" else name: v for name, v in options.items()}
            return self._give_back(*args, **options)
        if func is F.scaled_dot_product_attention and options.get("dropout_p", 0) > 0:
            self.calls += 1
            options["dropout_p"] = 0.0
        return func(*args, **options)

    def _give_back(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.calls += bool(training and p > 0)
        return x
