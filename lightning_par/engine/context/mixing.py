"""What mixes tokens besides attention, looked for in the first step on divided sequences.

Context parallelism divides the attention of the blocks. Every other operation along T, such as a
convolution, a scan, a mean or a shift, would see the tokens of one rank only, as if the sequence
ended there. Positions that a model counts by itself would start anew on every rank.

Shapes: t tokens of one rank.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.errors import ConfigurationError

__all__ = ["CountedPositions", "check_mixing"]

_CURE = (
    "Context parallelism divides attention only. If this code computes attention, call "
    "F.scaled_dot_product_attention or lightning_par.attention instead. Otherwise use "
    "context_parallel_size=1 for this model; for long sequences use activation checkpointing or "
    "tensor parallelism."
)
_ALONG_DIM = frozenset(
    {
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "flip", "roll",
        "mean", "sum", "amax", "amin", "max", "min", "logsumexp", "softmax", "log_softmax",
    }
)  # fmt: skip
_WHOLE = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_FLEX, _FLEX_MODULE = "flex_attention", "torch.nn.attention.flex_attention"
_CONVOLUTIONS: Mapping[Callable[..., Any], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def check_mixing(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], t: int) -> None:
    """Refuse an operation inside a block that mixes the tokens of this rank.

    Args:
        func: What a block calls.
        args: Its arguments.
        kwargs: Its keyword arguments.
        t: Number of tokens of this rank.

    Raises:
        ConfigurationError: It mixes along T; attention does not come here.
    """
    # The first argument decides; an operation without a tensor mixes nothing.
    x = args[0] if args else kwargs.get("input")
    # With one token there is nothing to mix; a tensor of one dim has no tokens.
    if not isinstance(x, Tensor) or x.ndim < 2 or t < 2:
        return
    name = getattr(func, "__name__", "")
    if name == _FLEX or _is_in(_FLEX_MODULE):
        name, mixes = _FLEX, True  # which compiles itself, and shows what it calls first only
    elif func in _CONVOLUTIONS:
        kernel = (args[1] if len(args) > 1 else kwargs["weight"]).shape[2:]
        places = x.shape[-_CONVOLUTIONS[func] :]
        # A kernel of width 1 sees one token at a time.
        mixes = any(size == t and width > 1 for size, width in zip(places, kernel, strict=True))
    elif name in _ALONG_DIM and x.ndim > 2:
        mixes = _goes_along(name, x, kwargs.get("dim", args[1] if len(args) > 1 else None), t)
    elif name == "pad" and x.ndim > 2:
        pads = args[1] if len(args) > 1 else kwargs["pad"]
        # F.pad counts dims from the last: entries 2 i and 2 i + 1 are of dim -1 - i.
        mixes = any(x.shape[-1 - place // 2] == t and pads[place] for place in range(len(pads)))
    elif func is Tensor.__getitem__ and x.ndim > 2:
        mixes = _takes_part(x, args[1], t)
    else:
        mixes = name in _WHOLE or name.startswith("fft_")
    if mixes:
        raise ConfigurationError(
            "LP306",
            f"{_caller()} combines tokens of a sequence with {name}, but under context "
            f"parallelism this operation would get only the {t} tokens of one rank. {_CURE}",
        )


def _is_in(module: str) -> bool:
    """Tell whether code of a module calls what is being checked, directly or nearly so."""
    frames = islice(traceback.walk_stack(sys._getframe(2)), 6)
    return any(frame.f_globals.get("__name__") == module for frame, _ in frames)


def _goes_along(name: str, x: Tensor, dim: object, t: int) -> bool:
    """Tell whether a dim of a tensor is certain to be that of its t tokens: none but the features,
    which come last, has the same size.
    """
    dims = dim if isinstance(dim, tuple | list) else [dim]
    inner = {d % x.ndim for d in dims if isinstance(d, int) and -x.ndim <= d < x.ndim}
    if inner == {x.ndim - 1}:  # the scores of attention that nobody intercepts
        # No softmax takes a mean, but norms of heads do, which may have t features.
        return name != "mean" and x.ndim == 4 and x.shape[-1] == x.shape[-2] == t
    # Certain only if no other dim has t entries by chance.
    return x.shape.count(t) == 1 and any(x.shape[d] == t for d in inner - {x.ndim - 1})


def _takes_part(x: Tensor, index: Any, t: int) -> bool:
    """Tell whether an index takes some, but not all, of the t tokens of a tensor [B, ..., D]."""
    parts = index if isinstance(index, tuple) else (index,)
    if x.shape.count(t) > 1 or any(not isinstance(part, int | slice) for part in parts):
        return False
    # Without the first dim, which is the batch, and the last, which is features.
    for size, part in list(zip(x.shape[:-1], parts, strict=False))[1:]:
        taken = len(range(*part.indices(size))) if isinstance(part, slice) else 1
        if size == t and 0 < taken < size:
            return True
    return False


def _caller() -> str:
    """Return the class of the innermost module of the model on the stack, and its line."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        ours = __name__.partition(".")[0] == frame.f_globals.get("__name__", "").partition(".")[0]
        torchs = frame.f_globals.get("__name__", "").startswith("torch.")
        if isinstance(owner, nn.Module) and not ours and not torchs:
            return f"{type(owner).__name__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "a block"


def _is_in_metric() -> bool:
    """Tell whether torchmetrics is on the stack, which counts classes and bins."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if frame.f_globals.get("__name__", "").startswith("torchmetrics."):
            return True
        frame = frame.f_back
    return False


class CountedPositions(TorchFunctionMode):
    """Notes where a step counts 0, ..., t - 1, or takes the first t rows of a table.

    Args:
        t: Number of tokens of this rank.

    Attributes:
        found: Who did; None: nobody.
    """

    def __init__(self, t: int) -> None:
        super().__init__()
        self._t = t
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # First the call: its result tells how many positions were counted.
        out = func(*args, **(kwargs or {}))
        if self.found is None and self._t > 1:
            if func is torch.arange:
                # Integers from 0 to t - 1 are positions, or classes: then torchmetrics is on the
                # stack.
                counts = out.ndim == 1 and len(out) == self._t and not out.is_floating_point()
            else:
                counts = func is Tensor.__getitem__ and self._is_head(args[0], args[1])
            if counts and not _is_in_metric():
                self.found = _caller()
        return out

    def _is_head(self, x: Tensor, index: Any) -> bool:
        first = index[0] if isinstance(index, tuple) and index else index
        # A computed tensor is no table of positions.
        if not isinstance(first, slice) or x.ndim < 2 or x.grad_fn is not None:
            return False
        return first.start in (None, 0) and first.stop == self._t and x.shape[0] > self._t
