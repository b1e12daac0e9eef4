"""Modes in which runs on different layouts can be compared number by number: float64 throughout,
and no dropout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.upstream.functions import with_visible_calls

__all__ = ["DoublePrecision", "WithoutDropout"]


class DoublePrecision(TorchFunctionMode):
    """Inside, a float64 tensor that is asked to become float32 stays float64.

    Many models compute norms, softmaxes or the loss in float32 whatever their dtype is. Two layouts
    that add in another order then differ by the rounding of float32, 1e-7, which hides small
    mistakes.

    Only for comparing layouts: the same on both sides, it changes what is computed by the rounding
    of float32.

    Examples:
        >>> with DoublePrecision():
        ...     torch.zeros(1, dtype=torch.float64).float().dtype
        torch.float64
        >>> frequencies = torch.ones(1, 2, dtype=torch.float64)
        >>> with DoublePrecision():  # as rotary embeddings do with positions
        ...     (torch.arange(3).float()[:, None] @ frequencies.float()).dtype
        torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the dtype where the first argument is float64."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        # The first argument decides: its dtype is what is asked to change.
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                func = Tensor.double
            # E.g. `x.to(torch.float32)`, `softmax(x, -1, dtype)`.
            args = [torch.float64 if a is torch.float32 else a for a in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        # Products take one dtype: what was made in float32 (positions) meets what stayed float64.
        if func in _PRODUCTS and any(_is_of(torch.float64, a) for a in args):
            args = [a.double() if _is_of(torch.float32, a) else a for a in args]
        return func(*args, **kwargs)


_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


def _is_of(dtype: torch.dtype, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
)
_KEEPS = (Tensor.bernoulli_, Tensor.bernoulli, torch.bernoulli)
_OF_RRELU = ("input", "lower", "upper", "training", "inplace")
_NAMES = {"input": "x", "train": "training"}
_ATTENTION_DROPOUT = 4
"""Place of `dropout_p` among the arguments of `F.scaled_dot_product_attention`."""


def _probability(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> float | None:
    """Return the one probability of a draw; None if tensors of probabilities are data."""
    default = 0.5 if func is Tensor.bernoulli_ else None
    p = options.get("p", args[1] if len(args) > 1 else default)
    if p is None:
        p = args[0] if args else options["input"]
        # One rate for each sample, to be multiplied with activations, is no data.
        is_rate = p.ndim > 1 and not p.is_meta and 0 < p.numel() == p.shape[0]
        is_filled = is_rate and bool((p == p.flatten()[0]).all())
        return float(p.flatten()[0]) if is_filled else None
    return p if isinstance(p, float) else None


class WithoutDropout(TorchFunctionMode):
    """Inside, the functions of dropout return their input.

    Attributes:
        calls: How many would have changed something.

    Examples:
        >>> with WithoutDropout() as mode:
        ...     F.dropout(torch.ones(2), 0.5).tolist()
        [1.0, 1.0]
        >>> mode.calls
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function without dropout."""
        options = dict(kwargs or {})
        if func in _DROPOUTS:
            # `torch.dropout(input, p, train)` names what `F.dropout` does otherwise.
            options = {_NAMES.get(name, name): v for name, v in options.items()}
            return self._keep_all(*args, **options)
        if func is F.multi_head_attention_forward:
            with self:  # for the dropout of its attention weights
                return with_visible_calls(func)(*args, **options)
        if func is F.scaled_dot_product_attention:
            at = _ATTENTION_DROPOUT
            given = args[at] if len(args) > at else options.pop("dropout_p", 0.0)
            self.calls += given > 0
            # Called with 0 all the same: the attention itself has to be computed.
            args = [*args[:at], *([0.0] if len(args) > at else []), *args[at + 1 :]]
        if func is F.rrelu:  # draws the slopes of what is negative
            given = dict(zip(_OF_RRELU, args, strict=False)) | options
            self.calls += bool(given.get("training", False))
            return func(**{**given, "training": False})
        if func in _KEEPS:  # as stochastic depth draws what it keeps
            p = _probability(func, args, options)
            if p is not None:
                self.calls += 1
                value = args[0] if args else options["input"]
                # Keeps all, or drops all where it mostly drops.
                made = value if func is Tensor.bernoulli_ else torch.empty_like(value)
                return made.fill_(float(p >= 0.5))
        return func(*args, **options)

    def _keep_all(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.calls += bool(training and p > 0)
        return x
