"""`self.log` under a mesh: the values of the whole batch, known to every rank.

Micro-batches are combined with the weights of the loss. With ``sync_dist=True`` the replicas are,
too, so that a mean is the mean that one process would have logged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_par.errors import ConfigurationError
from lightning_par.upstream.torchmetrics import last_batch_value, set_last_batch_value

__all__ = ["BatchShares", "LogCall", "adjust_logs", "combine_logs", "record_logs", "replay_logs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchShares:
    """What this replica's micro-batches weigh in the global batch.

    Attributes:
        scales: For every micro-batch, ranks * (its valid entries) / (those of the global batch),
            where the ranks are those that see other tokens; the gradient of a mean over them of
            losses times these is that of the global mean.
        total: What this replica weighs: 1 on average over the replicas.
        samples: Samples in the global batch, or None if nobody counted.
        silent: Micro-batches of this replica that weigh nothing.
        divided: Ranks that see other tokens of the same samples; None: this one sees them all.
    """

    scales: tuple[Tensor, ...]
    total: Tensor
    samples: Tensor | None
    silent: frozenset[int] = frozenset()
    divided: dist.ProcessGroup | None = None

    @property
    def own(self) -> Tensor:
        """What this rank weighs: 1 on average over those that see other tokens."""
        return torch.stack(self.scales).sum()


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One call of `self.log`.

    Attributes:
        name: Key.
        value: A number or tensor; for a metric, the value of its last forward.
        metric: FQN of the torchmetrics metric that was logged, or None.
        options: The other arguments.
    """

    name: str
    value: Any
    metric: str | None
    options: dict[str, Any]


@contextmanager
def _shadow_log(module: pl.LightningModule, log: Any) -> Iterator[None]:
    """Let `self.log` mean `log`; `self.log_dict` goes through it as well."""
    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]


@contextmanager
def record_logs(module: pl.LightningModule, calls: list[LogCall]) -> Iterator[None]:
    """Keep the calls of `self.log` instead of carrying them out."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise ConfigurationError(f"self.log({name!r}, ...): pass options by keyword.")
        if isinstance(value, dict):
            raise ConfigurationError(f"self.log({name!r}, dict): use self.log_dict.")
        metric = None
        if isinstance(value, Metric):
            names = (path for path, part in module.named_modules() if part is value)
            metric = next(names, None)
            if metric is None:
                raise ConfigurationError(
                    f"self.log({name!r}, metric): the metric is not an attribute of the "
                    f"{type(module).__name__}; set it in __init__ as self.{name} = ..."
                )
            value = last_batch_value(value)
        value = value.detach() if isinstance(value, Tensor) else value
        calls.append(LogCall(name=name, value=value, metric=metric, options=options))

    with _shadow_log(module, log):
        yield


@contextmanager
def adjust_logs(module: pl.LightningModule, shares: BatchShares | None) -> Iterator[None]:
    """Weight what is logged with ``sync_dist=True`` so that Lightning's mean over replicas is the
    global mean.
    """
    if shares is None:
        yield
        return
    original = type(module).log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        value, options = _weighted(value, options, shares)
        original(module, name, value, *args, **options)

    with _shadow_log(module, log):
        yield


def _weighted(
    value: Any, options: dict[str, Any], shares: BatchShares | None
) -> tuple[Any, dict[str, Any]]:
    """Scale a mean over replicas; a call with its own ``batch_size`` already says how its value
    weighs.
    """
    if shares is not None and shares.divided is not None and not isinstance(value, Metric):
        value, options = _join(value, options, shares)
    mean = options.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)
    explicit = options.get("batch_size") is not None
    if (
        shares is None
        or shares.samples is None
        or not options.get("sync_dist")
        or not mean
        or explicit
    ):
        return value, options
    if isinstance(value, Metric):
        return value, options
    value = torch.as_tensor(value, device=shares.total.device)
    value = value if value.is_floating_point() else value.float()
    value = torch.where(shares.total > 0, value, 0) * shares.total
    return value, {**options, "batch_size": shares.samples}


def _join(value: Any, options: dict[str, Any], shares: BatchShares) -> tuple[Any, dict[str, Any]]:
    """Return what a rank would have logged that sees the whole samples.

    **Communicates**: one all-reduce of one or two numbers over `shares.divided`.
    """
    name = reduction_name(options.get("reduce_fx", "mean"))
    value = torch.as_tensor(value, device=shares.total.device)
    kind = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    if name not in ("mean", "avg"):
        operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        joined = value.double()
        dist.all_reduce(joined, operations[name], group=shares.divided)
        return joined.to(kind), options
    size = options.get("batch_size")
    weight = shares.own if size is None else shares.own.new_tensor(float(size))
    sums = torch.stack([torch.where(weight > 0, value.double(), 0) * weight, weight])
    dist.all_reduce(sums, group=shares.divided)
    joined = (sums[0] / sums[1]).to(kind)  # NaN over no entry, as one process has it
    if size is not None:
        options = {**options, "batch_size": sums[1]}
    return joined, options


def combine_logs(calls: Sequence[Sequence[LogCall]], weights: Tensor) -> list[LogCall]:
    """Make one call per key of the calls of all micro-batches.

    Args:
        calls: Per micro-batch, in order.
        weights: [m], valid entries of every micro-batch; for means.
    """
    by_name: dict[str, list[tuple[int, LogCall]]] = {}
    for index, made in enumerate(calls):
        for call in made:
            by_name.setdefault(call.name, []).append((index, call))
    combined = []
    for name, pairs in by_name.items():
        last = pairs[-1][1]
        value = last.value
        if last.metric is None:
            used = weights[[index for index, _ in pairs]].cpu()
            values = torch.stack([torch.as_tensor(c.value).double().cpu() for _, c in pairs])
            value = combine_values(values, used, last.options.get("reduce_fx", "mean"))
        sizes = [c.options.get("batch_size") for _, c in pairs]
        options = last.options
        if any(size is not None for size in sizes):
            options = {**options, "batch_size": sum(size or 0 for size in sizes)}
        combined.append(LogCall(name=name, value=value, metric=last.metric, options=options))
    return combined


def combine_values(values: Tensor, weights: Tensor, reduce_fx: Any) -> Tensor:
    """Reduce [m] values; a micro-batch that weighs nothing does not count, whatever its value."""
    name = reduction_name(reduce_fx)
    counted = values[weights > 0] if bool((weights > 0).any()) else values
    if name in ("mean", "avg"):
        used = weights[weights > 0]
        return (counted * used).sum() / used.sum() if used.numel() else counted.mean()
    reductions: dict[str, Callable[[], Tensor]] = {
        "sum": values.sum,
        "max": counted.amax,
        "min": counted.amin,
    }
    return reductions[name]()


def reduction_name(reduce_fx: Any) -> str:
    """Return ``mean``, ``avg``, ``sum``, ``max`` or ``min``.

    Raises:
        ConfigurationError: It is another function.
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name not in ("mean", "avg", "sum", "max", "min"):
        raise ConfigurationError(f"self.log(reduce_fx={reduce_fx!r}): use mean, sum, max or min.")
    return str(name)


def replay_logs(
    module: pl.LightningModule,
    calls: Sequence[LogCall],
    shares: BatchShares | None,
    batch_size: int,
) -> None:
    """Carry out, on this rank, the calls that the last stage combined.

    Args:
        module: The user's.
        calls: From `combine_logs`, the same on every stage.
        shares: Of this replica, or None if it is the only one.
        batch_size: Samples of this replica's batch, for calls that do not say.
    """
    for call in calls:
        if call.metric is not None:
            metric = module.get_submodule(call.metric)
            set_last_batch_value(metric, call.value)
            module.log(call.name, metric, **{"batch_size": batch_size, **call.options})  # type: ignore[arg-type]
            continue
        value, options = _weighted(call.value, call.options, shares)
        options = {"batch_size": batch_size, **options}
        if isinstance(value, Tensor):
            value = value.to(torch.get_default_dtype()).to(module.device)
        module.log(call.name, value, **options)
