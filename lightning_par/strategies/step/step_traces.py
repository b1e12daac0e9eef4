"""What the user's step logs.

`self.log` under a mesh gives the values of the whole batch, known to every rank. Micro-batches are
combined with the weights of the loss. With ``sync_dist=True`` the replicas are, too, so that a mean
is the mean that one process would have logged.
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.data.filled_batch import log_nothing
from lightning_par.strategies.step.batch_weights import BatchWeights, weigh, weighted_mean
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.torchmetrics import last_batch_value, set_last_batch_value

__all__ = [
    "MEAN_OF_SAMPLES",
    "NOT_OF_PARTS",
    "SAME_KIND",
    "SUM_OF_PARTS",
    "LogCall",
    "adjust_logs",
    "combine_logs",
    "compare_parts",
    "join_over_context",
    "logs_off",
    "noted_logs",
    "numbers_of",
    "record_logs",
    "replay_logs",
]


_REDUCTIONS = ("mean", "avg", "sum", "max", "min")


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One call of `self.log`.

    Attributes:
        name: Logged key.
        value: A number or tensor; for a metric, its value for the batch so far.
        metric: FQN of the torchmetrics metric that was logged, or None.
        options: The other arguments of `self.log`.
        is_plain: Whether the value was a number of Python.
    """

    name: str
    value: Any
    metric: str | None
    options: dict[str, Any]
    is_plain: bool = False


def logs_off(module: pl.LightningModule) -> AbstractContextManager[None]:
    """Inside, `self.log` does nothing, nor does `self.log_dict`, which calls it."""
    return replaced(module, "log", lambda *_, **__: None)


def noted_logs(module: pl.LightningModule, calls: list[LogCall]) -> AbstractContextManager[None]:
    """Record the calls of `self.log` with numbers, and carry all of them out.

    Args:
        module: The user's LightningModule.
        calls: Gets them.
    """
    original = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, int | float | Tensor):
            calls.append(LogCall(name=name, value=_as_logged(value), metric=None, options=options))
        original(name, value, *args, **options)

    return replaced(module, "log", log)


def record_logs(
    module: pl.LightningModule,
    calls: list[LogCall],
    value_of: Callable[[Metric], Any] = last_batch_value,
    *,
    on_step: bool = True,
) -> AbstractContextManager[None]:
    """Record the calls of `self.log` instead of carrying them out.

    Args:
        module: The user's LightningModule.
        calls: Gets them.
        value_of: Gives the value of a metric that is logged for the step.
        on_step: Whether it is, if the call does not say.
    """

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise ConfigurationError(
                "LP316",
                f"self.log({name!r}, value, ...) was called with options by position. Pass the "
                "options by keyword, as in self.log(name, value, prog_bar=True).",
            )
        if isinstance(value, dict):
            raise ConfigurationError(
                "LP316",
                f"self.log({name!r}, ...) got a dict. Use self.log_dict for several values.",
            )
        metric = None
        if isinstance(value, Metric):
            names = (path for path, part in module.named_modules() if part is value)
            metric = next(names, None)
            if metric is None:
                raise ConfigurationError(
                    "LP316",
                    f"self.log({name!r}, metric) got a metric that is not an attribute of "
                    f"{type(module).__name__}. Assign it in __init__, as in self.{name} = metric.",
                )
            # Lightning's defaults: on_step is True in training_step, False in evaluation steps.
            is_of_step = on_step if options.get("on_step") is None else options["on_step"]
            value = (value_of if is_of_step else last_batch_value)(value)
        value = _as_logged(value)
        calls.append(LogCall(name=name, value=value, metric=metric, options=options))

    return replaced(module, "log", log)


def _as_logged(value: Any) -> Any:
    # Without its graph, and copied: the step may change it in place, and FSDP frees weights.
    return value.detach().clone() if isinstance(value, Tensor) else value


def numbers_of(calls: Sequence[LogCall]) -> list[LogCall]:
    """Return the calls that logged numbers, which are then on the host; no metrics."""
    return [
        replace(call, value=float(call.value), is_plain=not isinstance(call.value, Tensor))
        for call in calls
        if call.metric is None and isinstance(call.value, int | float | Tensor)
    ]


SAME_KIND, MEAN_OF_SAMPLES, SUM_OF_PARTS, NOT_OF_PARTS = range(4)
"""What a number that a batch logs is of those that its parts log; see `compare_parts`."""


def compare_parts(
    logs: Sequence[Sequence[LogCall]],
    weights: Tensor,
    tolerance: float,
    samples: Sequence[int] = (),
) -> dict[str, int]:
    """Return, for every logged number, how that of a batch follows from those of its parts.

    `SAME_KIND`: by the reduction with which it is logged, weighted as the loss.
    `MEAN_OF_SAMPLES`: as one weighted by samples, whatever weighs in the loss; also a sum may be.
    `SUM_OF_PARTS`: as a sum, although it is logged as a mean. `NOT_OF_PARTS`: in no such way.

    Args:
        logs: From `numbers_of`, of the batch and of each of its parts.
        weights: [m] weights of the parts.
        tolerance: Of roundings, relative.
        samples: Numbers of samples of the parts.
    """

    def is_near(one: float, other: float) -> bool:
        nothing = tolerance / 100  # of numbers near 0, which others of size 1 may have made
        # NaN of the whole is no sign of anything: a mean over no valid entry has it on parts,
        # too.
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=nothing) or one != one

    known = [[call for call in calls if _name_of(call) in _REDUCTIONS] for calls in logs]
    together = combine_logs(known[1:], weights, samples=samples)
    combined = {call.name: float(call.value) for call in together}
    counts = torch.tensor([*samples], dtype=weights.dtype) if samples else weights
    # Unless weights differ from the numbers of samples, both means are the same number.
    alike = bool(torch.allclose(counts / counts.sum(), weights / weights.sum()))
    summed = {call.name for calls in known for call in calls if _name_of(call) == "sum"}
    averaged = combine_logs(known[1:], counts, by_samples=summed)
    means = {call.name: float(call.value) for call in averaged}
    kinds: dict[str, int] = {}
    for call in known[0]:
        kinds.setdefault(call.name, SAME_KIND)
        if call.name not in combined:
            continue
        # A plain number that is the same for all parts says nothing: it is no part of a loss.
        values = {part.value for calls in known[1:] for part in calls if part.name == call.name}
        is_sum = call.name in summed
        is_mean = (is_sum or not alike) and is_near(call.value, means[call.name])
        if is_near(call.value, combined[call.name]):
            if is_mean and not is_sum and call.is_plain and len(values) == 1:
                kinds[call.name] = max(kinds[call.name], MEAN_OF_SAMPLES)
            continue
        total = sum(part.value for calls in known[1:] for part in calls if part.name == call.name)
        is_total = is_near(call.value, total)
        kind = MEAN_OF_SAMPLES if is_mean else SUM_OF_PARTS if is_total else NOT_OF_PARTS
        kinds[call.name] = max(kinds[call.name], kind)
    return kinds


def adjust_logs(
    module: pl.LightningModule, weights: BatchWeights | None, samples: int = 0
) -> AbstractContextManager[None]:
    """Weight what is logged with ``sync_dist=True`` so that Lightning's mean over replicas is the
    global mean.

    Args:
        module: The user's LightningModule.
        weights: Of the batch of this replica; None: all replicas weigh the same.
        samples: Its number, in training.

    **Communicates**: in training two numbers over the replicas, for a mean that is logged with a
    ``batch_size``.
    """
    original = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        value, options = _of_global_batch(module, name, value, options, weights, samples)
        original(name, value, *args, **options)

    is_plain = weights is None and not samples
    return nullcontext() if is_plain else replaced(module, "log", log)


def _without_samples(
    name: str, value: Any, options: dict[str, Any], weights: BatchWeights | None
) -> dict[str, Any]:
    """Leave out a `batch_size` that is the number of samples, which weighs no part of a batch."""
    if weights is None or name not in weights.sized or isinstance(value, Metric):
        return options
    return {key: option for key, option in options.items() if key != "batch_size"}


def _weighs_itself(value: Any, options: dict[str, Any]) -> bool:
    """Whether a mean for the step is logged with a weight of its own.

    All replicas have to answer alike, as a collective follows: not by what the weight is, which may
    be the number of samples on some of them.
    """
    kind = reduction_name(options.get("reduce_fx", "mean"))
    is_mean = kind in ("mean", "avg") and not isinstance(value, Metric)
    is_joined = bool(options.get("sync_dist")) and options.get("on_step") is not False
    return options.get("batch_size") is not None and is_mean and is_joined


def _joined(
    module: pl.LightningModule,
    value: Any,
    options: dict[str, Any],
    weights: BatchWeights | None,
    samples: int,
) -> Any:
    """Return the mean over the replicas of a value that is logged with its own weight, for a step;
    other values as they are. Lightning weighs in the mean over an epoch only.
    """
    if not samples or not _weighs_itself(value, options):
        return value
    strategy: Any = module.trainer.strategy
    if not module.trainer.training or strategy.mesh.sizes.data == 1:
        return value
    value = torch.as_tensor(value, device=module.device)
    kind = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    size = 0 if weights is not None and weights.fills else options["batch_size"]
    own = torch.tensor(float(size), dtype=torch.float64, device=value.device)
    # A collective of all ranks, which `_weighs_itself` decides by the options of the call alone.
    total, count = strategy.reduce(torch.stack([weigh(value.double(), own), own]), reduce_op="sum")
    return (total / count).to(kind)


def _of_global_batch(
    module: pl.LightningModule,
    name: str,
    value: Any,
    options: dict[str, Any],
    weights: BatchWeights | None,
    samples: int,
) -> tuple[Any, dict[str, Any]]:
    """Scale a value by the weight of this replica, if Lightning averages it over the replicas.

    A call with its own ``batch_size`` already says how its value weighs, unless that is the number
    of samples, see `_without_samples`.
    """
    options = _without_samples(name, value, options, weights)
    # Joined first: a value with a weight of its own leaves nothing to scale.
    own, value = value, _joined(module, value, options, weights, samples)
    if weights is not None and not isinstance(value, Metric):
        if weights.fills and value is not own:
            return value, {**options, "batch_size": 0}  # in a step, but nothing in an epoch
        # It repeats a sample of another replica: what it logs must not move the mean.
        if weights.fills:
            name = reduction_name(options.get("reduce_fx", "mean"))
            return log_nothing(name, value, options, weights)
        if weights.context_group is not None:
            value, options = join_over_context(value, options, weights)
    mean = reduction_name(options.get("reduce_fx", "mean")) in ("mean", "avg")
    is_sum = weights is not None and name in weights.sums
    # The user's batch_size is the weight of the value; a second one would count twice.
    explicit = options.get("batch_size") is not None and not is_sum
    is_averaged = mean and not explicit and options.get("sync_dist")
    if weights is None or weights.samples is None or isinstance(value, Metric) or not is_averaged:
        return value, options
    value = torch.as_tensor(value, device=weights.total.device)
    value = value if value.is_floating_point() else value.float()
    if is_sum:  # Lightning divides by the number of replicas
        return value * weights.replicas, {"batch_size": weights.samples, **options}
    options = {**options, "batch_size": weights.samples}
    # Lightning's mean divides by the number R of replicas:
    # mean(v_r * n_r * R / N) = sum(v_r * n_r) / N.
    if name in weights.by_samples:
        scaled = value * (sum(weights.sizes) * weights.replicas) / weights.samples
    else:
        scaled = weigh(value, weights.total)
    # The dtype that Lightning has for the same value of a replica that repeats a sample: one
    # collective takes both.
    is_double = torch.float64 in (value.dtype, torch.get_default_dtype())
    is_single = value.dtype == torch.float32
    return scaled.to(torch.float64 if is_double and not is_single else torch.float32), options


def join_over_context(
    value: Any, options: dict[str, Any], weights: BatchWeights
) -> tuple[Any, dict[str, Any]]:
    """Combine a value over the context ranks: what a rank with whole samples would have logged.

    A `batch_size` that is the same on all of them is the number of samples, which says nothing of
    the tokens of a rank; another one is the weight of the value.

    **Communicates**: one all-reduce of up to six numbers over `weights.context_group`.
    """
    name = reduction_name(options.get("reduce_fx", "mean"))
    value = torch.as_tensor(value, device=weights.total.device)
    kind = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    if name not in ("mean", "avg"):
        operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        joined = value.double()
        dist.all_reduce(joined, operations[name], group=weights.context_group)
        return joined.to(kind), options
    # Six sums in one message, as nobody knows yet which of the two means is meant.
    size, one = options.get("batch_size"), value.double()
    if size is None:
        mean, _ = weighted_mean(one, weights.own, weights.context_group)
        return mean.to(kind), options  # NaN over no entry, as one process has it
    own = weights.own.double()
    given = own.new_tensor(float(size))
    pairs = [weigh(one, own), own, weigh(one, given), given, given**2, own.new_ones(())]
    sums = torch.stack(pairs)
    dist.all_reduce(sums, group=weights.context_group)
    by_tokens, tokens, by_size, total, squares, ranks = sums.unbind()
    # Decided on the device: a number on the host would have to be waited for.
    # By Cauchy-Schwarz, R * sum(g**2) = sum(g)**2 only if all R values are equal.
    is_same = ranks * squares == total**2
    mean = torch.where(is_same, by_tokens / tokens, by_size / total)
    return mean.to(kind), {**options, "batch_size": torch.where(is_same, given, total)}


def combine_logs(
    calls: Sequence[Sequence[LogCall]],
    weights: Tensor,
    sums: Collection[str] = (),
    by_samples: Collection[str] = (),
    samples: Sequence[int] = (),
) -> list[LogCall]:
    """Make one call per key of the calls of all micro-batches.

    Args:
        calls: Recorded calls of every micro-batch, in order.
        weights: [m] weights of the micro-batches, for means.
        sums: Keys whose values are added in place of a mean.
        by_samples: Keys whose values weigh by the samples; those of a sum have a mean, too.
        samples: Numbers of samples of the micro-batches.
    """
    by_name: dict[str, list[tuple[int, LogCall]]] = {}
    for index, made in enumerate(calls):
        for call in made:
            by_name.setdefault(call.name, []).append((index, call))
    combined = []
    for name, pairs in by_name.items():
        # Options of a key are those of its last call, as Lightning keeps them.
        last = pairs[-1][1]
        value = last.value
        sizes: list[Any] = [c.options.get("batch_size") for _, c in pairs]
        counted = [samples[index] for index, _ in pairs] if samples else sizes
        if last.metric is None:
            used = torch.stack([weights[index] for index, _ in pairs])
            if name in by_samples and samples:
                used = used.new_tensor([float(count) for count in counted])
            # batch_size of each call equal to its samples says nothing new.
            if None not in sizes and sizes != counted:  # each says what it is a mean of
                used = used.new_tensor([float(size) for size in sizes])
            values = torch.stack([_number(call.value, weights) for _, call in pairs])
            kind = reduction_name(last.options.get("reduce_fx", "mean"))
            adds = name in sums and kind in ("mean", "avg")
            over = name in by_samples and kind == "sum"  # over batches, as of 1 for each
            value = combine_values(values, used, "sum" if adds else "mean" if over else kind)
        options = last.options
        if any(size is not None for size in sizes):
            options = {**options, "batch_size": sum(size or 0 for size in sizes)}
        combined.append(LogCall(name=name, value=value, metric=last.metric, options=options))
    return combined


def combine_values(values: Tensor, weights: Tensor, reduce_fx: Any) -> Tensor:
    """Reduce [m] values; see Note [Weight 0] in `batch_weights.py`, unless all weights are 0."""
    name = reduction_name(reduce_fx)
    if name == "sum":
        return values.sum()
    # Decided on the device: a number on the host would have to be waited for.
    has_weight = (weights > 0).any()
    if name in ("mean", "avg"):
        return torch.where(has_weight, weighted_mean(values, weights)[0], values.mean())
    # If all weights are 0 every entry counts: a maximum over none would be -inf.
    counts = (weights > 0) | ~has_weight
    if name == "max":
        return values.where(counts, -torch.inf).amax()
    return values.where(counts, torch.inf).amin()


def _number(value: Any, like: Tensor) -> Tensor:
    """Return a logged number as a float64 scalar on the device of `like`, where it may be."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.double().reshape(())
    # torch.full on the device of the weights: a tensor made on the host would be copied.
    return torch.full((), float(value), dtype=torch.float64, device=like.device)


def reduction_name(reduce_fx: Any) -> str:
    """Return ``mean``, ``avg``, ``sum``, ``max`` or ``min``.

    Raises:
        ConfigurationError: It is another function.
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = name.lower()  # as Lightning takes it
    if name not in _REDUCTIONS:
        raise ConfigurationError(
            "LP316",
            f"self.log(reduce_fx={reduce_fx!r}) is not supported, since the values of "
            "micro-batches and ranks are combined by a mean, a sum or an extremum. Use "
            "reduce_fx='mean', 'sum', 'max' or 'min'.",
        )
    return str(name)


def _name_of(call: LogCall) -> str:
    kind = call.options.get("reduce_fx", "mean")
    return kind if isinstance(kind, str) else getattr(kind, "__name__", "")


def replay_logs(
    module: pl.LightningModule,
    calls: Sequence[LogCall],
    weights: BatchWeights | None,
    batch_size: int,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Carry out, on this rank, the calls that the last stage combined.

    Args:
        module: The user's LightningModule.
        calls: What `combine_logs` gave, the same on every stage.
        weights: Weights of this replica's micro-batches, or None if it is the only replica.
        batch_size: Samples of this replica's batch, for calls that do not say.
        context: Precision plugin's context of the step, whose dtype the logged numbers get.
    """
    # On every stage: with sync_dist=True `self.log` ends in a collective of all ranks, and
    # callbacks read the value on each of them.
    with context():
        for call in calls:
            if call.metric is not None:
                metric = module.get_submodule(call.metric)
                set_last_batch_value(metric, call.value)
                module.log(call.name, metric, **{"batch_size": batch_size, **call.options})  # type: ignore[arg-type]
                continue
            given = call.name, call.value, call.options, weights, batch_size
            value, options = _of_global_batch(module, *given)
            options = {"batch_size": batch_size, **options}
            if isinstance(value, Tensor):
                # As Lightning keeps them: in float32, or in float64.
                dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
                value = value.to(dtype).to(module.device)
            module.log(call.name, value, **options)
