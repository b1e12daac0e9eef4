"""Random numbers drawn in the user's step: what one process draws, cut like the batch.

Note [Whole draws]: one process draws the numbers of the whole batch at once. A rank that sees some
of the samples, or a micro-batch, therefore draws for all samples, from the state in which one
process would be, and keeps the rows of its own. What has no batch dim is drawn alike everywhere.
Afterwards every generator has advanced as far as that of one process. Which dim of a draw is the
batch dim shows when the step runs on batches of two sizes, before the first step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.engine.rng import is_own_draw, real_draws
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.upstream.autograd import backward_inside
from lightning_par.upstream.functions import with_visible_calls

__all__ = ["Rows", "Tokens", "WholeDraws"]


@dataclass(frozen=True)
class Rows:
    """Samples of a batch that a step sees.

    Attributes:
        start: Number of the first one in the whole batch.
        length: How many they are.
        size: Samples of the whole batch.
        stride: Distance of two of them: replicas take the samples of a batch in turns.
    """

    start: int
    length: int
    size: int
    stride: int = 1


@dataclass(frozen=True)
class Tokens:
    """Tokens that a rank sees under sequence parallelism, in dim 1 of the activations.

    Attributes:
        start: Number of the first one.
        length: How many they are.
        size: T.
    """

    start: int
    length: int
    size: int


@dataclass(frozen=True)
class _Cut:
    """The dim of a draw that holds the samples, with `factor` entries for each (None: no dim does),
    and the tokens in dim 1, if this rank sees some of them.
    """

    dim: int | None = None
    factor: int = 1
    tokens: Tokens | None = None


@dataclass(frozen=True)
class _Draw:
    """A call that drew random numbers: its function, its shape, and where that holds samples."""

    name: str
    shape: tuple[int, ...]
    cut: _Cut | None = None


class WholeDraws(TorchFunctionMode):
    """Draws random numbers for the whole batch, and keeps those of this rank's samples; see Note
    [Whole draws].

    Args:
        device: Where modules that stand on meta, for their shapes only, draw.
        name: Of the step, for messages.

    Attributes:
        name: As given.
        drew: Whether anything but dropout drew.
        is_opaque: Whether a kernel drew that cannot be told which numbers to take.
        tokens: Tokens that this rank sees; None: all.
        refusal: Why the draws cannot be shared.
    """

    def __init__(self, device: torch.device, name: str = "training_step") -> None:
        super().__init__()
        self.name = name
        self.drew = self.is_opaque = False
        self.tokens: Tokens | None = None
        self.refusal: LightningParError | None = None
        self._device, self._rows = device, Rows(0, 1, 1)
        self._all: list[_Draw] = []  # what it draws for some samples
        self._plan: list[_Draw] = []  # for a part of them
        self._draws: list[_Draw] = []
        self._replayed: dict[tuple[str, tuple[int, ...]], _Cut | None] = {}
        self._replays = self._is_settled = False
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextmanager
    def forward(self, rows: Rows, *, rewinds: bool = False) -> Iterator[None]:
        """Surrounds the user's step on some samples.

        Args:
            rows: These samples.
            rewinds: Whether generators that are handed to the draws begin where they began for
                earlier rows of the same batch.
        """
        self._rows, self._draws, self._replays = rows, [], False
        if rewinds:
            self.rewind()
        else:
            self._generators.clear()
        with real_draws(), self:
            yield

    def rewind(self) -> None:
        """Put generators that were handed to the draws back to where they began."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    @contextmanager
    def replay(self, rows: Rows) -> Iterator[None]:
        """Surrounds a backward, in which blocks may be recomputed; it may be in the step."""
        self._rows, self._replays = rows, True
        try:
            with backward_inside(self):
                yield
        finally:
            self._replays = False

    @property
    def count(self) -> int:
        """Number of draws of the last forward."""
        return len(self._draws)

    def learn(self) -> None:
        """Take what the last forward drew, for some samples or a part of them, as what every step
        draws. A rank with several stages takes those of the last one.
        """
        # All samples: the reference. Some of them: compared with it, and what each step repeats.
        if self._rows.length == self._rows.size:
            self._all = max(self._draws, self._all, key=len)
        else:
            self._plan = max(self._draws, self._plan, key=len)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, for the whole batch if it draws."""
        handler, kwargs = _HANDLERS.get(func), kwargs or {}
        if handler is None or is_own_draw():
            return func(*args, **kwargs)
        self._note_generator(kwargs.get("generator"))
        return handler(self, func, args, kwargs)

    def choose(self, func: Any, shape: Sequence[int], *, is_dropout: bool = False) -> _Cut | None:
        """Return where the shape of a draw holds the samples, if they are some of a batch.

        Raises:
            ConfigurationError: It holds them in two dims.
        """
        name, shape = func.__name__, tuple(shape)
        self.drew = self.drew or not is_dropout
        # A draw for all samples is that of one process, and nothing has to be cut.
        rows = self._rows
        # Recomputation runs blocks in another order than the forward, and each may be recomputed
        # by itself: so its draws are found by name and shape, and not by their place.
        if self._replays:
            return self._replayed.get((name, shape))
        index = len(self._draws)
        cut = None
        if rows.length != rows.size:
            # In the look a part is compared with the draw for all samples that has the same
            # place. Later steps repeat the plan. A draw that it does not know, as in another
            # branch of the step, is taken to hold the samples in dim 0 if its length fits.
            plan = self._plan if self._is_settled else self._all
            known = plan[index] if index < len(plan) else None
            if known is not None and (known.name, len(known.shape)) == (name, len(shape)):
                cut = known.cut if self._is_settled else self._compare(known, shape)
            elif shape and shape[0] == rows.length:
                cut = _Cut(0, 1)
        tokens = self.tokens
        # Sequence parallelism: activations are [B, T/tp, D].
        if tokens is not None and len(shape) > 1 and shape[1] == tokens.length:
            cut = replace(cut or _Cut(), tokens=tokens)
        self._draws.append(_Draw(name, shape, cut))
        self._replayed[name, shape] = cut
        return cut

    def _compare(self, known: _Draw, shape: tuple[int, ...]) -> _Cut | None:
        """Find the batch dim: the one that is smaller than in the draw for all `size` samples."""
        rows = self._rows
        pairs = enumerate(zip(known.shape, shape, strict=True))
        dims = [dim for dim, (whole, part) in pairs if whole != part]
        # The same shape for all samples and for some: noise that all samples share.
        if not dims:
            return None
        (dim, *others) = dims
        if others or shape[dim] * rows.size != known.shape[dim] * rows.length:
            self.refuse(
                f"{self.name} calls {known.name} for a tensor of shape {known.shape} with "
                f"{rows.size} samples, and of shape {shape} with {rows.length} samples. These "
                "shapes do not show which random numbers belong to which sample, so micro-batches "
                "and replicas cannot draw the numbers of their own samples. Draw the numbers in "
                "the data set, or use num_microbatches=1 and data_parallel_size=1."
            )
            return None
        return _Cut(dim, shape[dim] // rows.length)

    def refuse(self, text: str) -> None:
        """Refuse a draw; while batches of two sizes are compared, at their end, on every rank.

        Raises:
            ConfigurationError: After `settle`.
        """
        error = ConfigurationError("LP311", text)
        if self._is_settled:
            raise error
        # The first refusal: later draws may follow from the one that could not be shared.
        self.refusal = self.refusal or error

    def begin_look(self) -> None:
        """Begin a comparison of batches of two sizes, which may draw more than in one before."""
        self._is_settled, self.refusal = False, None

    def settle(self) -> None:
        """End the comparison of batches of two sizes."""
        self._is_settled = True
        self._replayed.clear()

    def whole(self, shape: Sequence[int], cut: _Cut) -> list[int]:
        """Return the shape of a draw for the whole batch."""
        sizes = list(shape)
        if cut.dim is not None:
            sizes[cut.dim] = cut.factor * self._rows.size
        if cut.tokens is not None:
            sizes[1] = cut.tokens.size
        return sizes

    def own(self, drawn: Tensor, cut: _Cut) -> Tensor:
        """Return the numbers of this rank's samples and tokens."""
        rows, factor = self._rows, cut.factor
        if cut.tokens is not None:
            drawn = drawn.narrow(1, cut.tokens.start, cut.tokens.length)
        if cut.dim is None:
            return drawn
        if rows.stride == 1:
            # A whole micro-batch lies together; the samples of a replica have the others in
            # between.
            return drawn.narrow(cut.dim, factor * rows.start, factor * rows.length)
        samples = rows.start + rows.stride * torch.arange(rows.length, device=drawn.device)
        return drawn.index_select(cut.dim, _entries(samples, factor))

    def padded(self, value: Any, shape: Sequence[int], cut: _Cut) -> Any:
        """Return a tensor for the whole batch with this rank's part of `value` in its place."""
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
            return value
        rows, tokens = self._rows, cut.tokens
        # What stands in for rows and tokens of others is any value of ours (hence the clamp): it
        # only makes the call draw as many numbers as one process, and `own` drops its result.
        if tokens is not None:
            places = torch.arange(tokens.size, device=value.device) - tokens.start
            value = value.index_select(1, places.clamp(0, tokens.length - 1))
        if cut.dim is None:
            return value
        samples = (torch.arange(rows.size, device=value.device) - rows.start) // rows.stride
        samples = samples.clamp(0, rows.length - 1)
        return value.index_select(cut.dim, _entries(samples, cut.factor))

    # A generator of the user's is no part of the random state that `StepRandom` keeps.
    def _note_generator(self, generator: torch.Generator | None) -> None:
        """Remember where a generator that is handed to a draw began."""
        if generator is not None and not self._replays:
            self.drew = True
            self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def real(self, tensor: Tensor) -> Tensor:
        """Return a tensor like one on meta that can take random numbers."""
        return torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor


def _entries(samples: Tensor, factor: int) -> Tensor:
    """Return the places of samples in a dim that holds `factor` entries for each."""
    return (samples[:, None] * factor + torch.arange(factor, device=samples.device)).flatten()


def _empty_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor whose dims lie in memory in the order of those of `tensor`, as numbers
    are drawn in the order of the memory.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    places = [order.index(dim) for dim in range(tensor.ndim)]
    # Made in the order of the strides and permuted back: kernels fill memory from its start.
    return tensor.new_empty([shape[dim] for dim in order]).permute(places)


def _size_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that a factory is asked for."""
    if "size" in kwargs:
        return tuple(kwargs["size"])
    for value in args:
        if isinstance(value, list | tuple):
            return tuple(value)
    sizes = func in (torch.rand, torch.randn)
    return tuple(args) if sizes and all(isinstance(v, int) for v in args) else None


def _factory(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    shape = _size_of(func, args, kwargs)
    if shape is None:  # torch.normal of tensors
        return _pointwise(mode, func, args, kwargs)
    device = kwargs.get("device")
    is_meta = device is not None and torch.device(device).type == "meta"
    # A planner or a stage's shape run draws as well, so that later draws are the same ones.
    if is_meta:
        kwargs = {**kwargs, "device": mode._device}
    cut = mode.choose(func, shape)
    if cut is not None:
        sizes = mode.whole(shape, cut)
        rest = [v for v in args if not isinstance(v, list | tuple)]
        if func in (torch.rand, torch.randn):
            rest = []
        # `own` gives a view with the strides of the whole draw; a plain call gives its own
        # memory.
        drawn = mode.own(func(*rest, **{**kwargs, "size": sizes}), cut).contiguous()
    else:
        drawn = func(*args, **kwargs)
    return drawn.to("meta") if is_meta else drawn


def _permutation(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    count = args[0] if args else kwargs["n"]
    if mode.choose(func, (count,)) is not None:  # one dim: never that of tokens
        mode.refuse(
            f"{mode.name} calls torch.randperm({count}) to shuffle the samples of a batch, but "
            "other micro-batches or replicas hold some of these samples. Shuffle them in the "
            "collate_fn of the data loader, or use num_microbatches=1 and data_parallel_size=1."
        )
    return func(*args, **kwargs)


def _like(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args if args else [kwargs.pop("input")]
    cut, real = mode.choose(func, tensor.shape), mode.real(tensor)
    if cut is not None:
        drawn = func(_empty_like(real, mode.whole(tensor.shape, cut)), *rest, **kwargs)
        drawn = mode.own(drawn, cut).clone(memory_format=torch.preserve_format)
    else:
        drawn = func(real, *rest, **kwargs)
    return drawn.to("meta") if tensor.is_meta else drawn


def _in_place(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    cut, shape = mode.choose(func, tensor.shape), tensor.shape
    if cut is None and not tensor.is_meta:
        return func(*args, **kwargs)
    real = mode.real(tensor)
    if cut is None:
        func(real, *rest, **kwargs)
        return tensor
    # Probabilities or means may have one entry for each sample.
    rest = [mode.padded(value, shape, cut) for value in rest]
    kwargs = {name: mode.padded(value, shape, cut) for name, value in kwargs.items()}
    drawn = func(_empty_like(real, mode.whole(shape, cut)), *rest, **kwargs)
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.copy_(mode.own(drawn, cut))
    return tensor


def _pointwise(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    # Broadcasting: the largest operand has the shape of the result.
    tensor = max((v for v in values if isinstance(v, Tensor)), key=Tensor.numel)
    shape = tensor.shape
    cut = mode.choose(func, shape)
    if cut is None:
        return func(*args, **kwargs)
    padded = [mode.padded(value, shape, cut) for value in args]
    named = {name: mode.padded(value, shape, cut) for name, value in kwargs.items()}
    return mode.own(func(*padded, **named), cut).contiguous()


def _dropout(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    given.setdefault("training", given.pop("train", True))
    tensor, rate = given["input"], given.get("p", 0.5)
    if not given["training"] or rate == 0:
        return func(*args, **kwargs)
    cut = mode.choose(func, tensor.shape, is_dropout=True)
    if cut is None and not tensor.is_meta:
        return func(*args, **kwargs)
    shape = tensor.shape if cut is None else mode.whole(tensor.shape, cut)
    # Dropout of ones is the mask, scaled by 1 / (1 - p). It is drawn for the whole batch, cut,
    # and multiplied: so the gradient passes the product and no kernel of its own.
    ones = _empty_like(mode.real(tensor.detach()), shape).fill_(1)
    # training=True: with rate > 0 the kernel draws.
    mask = func(ones, rate, True)
    if tensor.is_meta:
        return tensor.clone()
    assert cut is not None
    return tensor * mode.own(mask, cut)


def _attention(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call attention, whose dropout draws inside its kernel, for the given samples only."""
    # dropout_p is the fifth argument of F.scaled_dot_product_attention.
    if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)) > 0:
        mode.is_opaque = True
    return func(*args, **kwargs)


def _composite(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that draws by other functions, which the mode gets."""
    with mode:
        return with_visible_calls(func)(*args, **kwargs)


def _opaque(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a kind of dropout whose mask is no factor, for the given samples only."""
    if any(value is True for value in (*args, *kwargs.values())):  # training=True, or by place
        mode.is_opaque = True
    return func(*args, **kwargs)


def _inseparable(mode: WholeDraws, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    if mode.choose(func, tensor.shape) is not None:
        mode.refuse(
            f"{mode.name} calls {func.__name__} for each sample. How many random numbers this "
            "needs depends on the values, so micro-batches and replicas cannot draw the numbers "
            "of their own samples. Draw the numbers in the data set, or use num_microbatches=1 "
            "and data_parallel_size=1."
        )
    return func(*args, **kwargs)


def _handlers() -> dict[Any, Callable[..., Any]]:
    named: dict[Callable[..., Any], tuple[Any, ...]] = {
        _factory: (torch.rand, torch.randn, torch.randint, torch.normal),
        _permutation: (torch.randperm,),
        _like: (torch.rand_like, torch.randn_like, torch.randint_like),
        _in_place: tuple(
            getattr(Tensor, f"{name}_")
            for name in (
                *("normal", "uniform", "exponential", "random"),
                *("geometric", "cauchy", "log_normal", "bernoulli"),
            )
        ),
        _pointwise: (torch.bernoulli, Tensor.bernoulli, torch.multinomial, Tensor.multinomial),
        _dropout: (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
        _attention: (F.scaled_dot_product_attention,),
        _composite: (F.gumbel_softmax, F.multi_head_attention_forward),
        _opaque: (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, F.rrelu),
        _inseparable: (torch.poisson, torch.binomial),
    }
    # torch.rand and Tensor.normal_ arrive under the function that the user called, before any
    # composite operation is taken apart: so each spelling has its own row.
    return {func: handler for handler, funcs in named.items() for func in funcs}


_HANDLERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(_handlers())
