"""Sizes of the parallel axes: checked, and fitted to a number of devices.

Axes, outermost first: ``pp`` (pipeline), ``dp_replicate``, ``dp_shard`` (data), ``cp`` (context),
``tp`` (tensor). Neighbouring ranks differ in ``tp`` first, so that the axis that talks most stays
inside a node. Experts see the ranks of ``dp_shard x cp`` divided once more, by ``ep``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_par.errors import either, MeshError, raise_problems

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "AutoRule",
    "ParallelSizes",
    "Size",
    "fit_sizes",
    "is_count",
]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "ep", "tp")
"""The same ranks in the same order, as experts see them."""

Size = int | Literal["auto"]
AutoRule = Literal["tensor", "pipeline", "context", "balanced", "data", "planned"]


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The size of every axis; their product is the number of ranks.

    Attributes:
        pipeline: Number of pipeline stages.
        data_replicate: Groups of ranks that hold a whole copy of the sharded state.
        data_shard: Ranks over which parameters, gradients or optimizer states are sharded.
        context: Ranks over which the sequence is sharded inside attention.
        tensor: Ranks over which a layer's weights are sharded.
        expert: Ranks, of ``dp_shard x cp``, over which experts are divided.

    Examples:
        >>> sizes = ParallelSizes(pipeline=2, tensor=2, data_shard=2)
        >>> sizes.world_size, sizes.describe(5)
        (8, 'rank 5 (pp 1, dp_shard 0, tp 1)')
    """

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        bad = {n: s for n, s in vars(self).items() if not is_count(s)}
        raise_problems(
            MeshError,
            "LP101",
            [f"{n}={s!r} must be a whole number of 1 or more." for n, s in bad.items()],
        )
        if self._expert_ranks % self.expert:
            raise MeshError(
                "LP103",
                f"expert_parallel_size={self.expert} does not divide the {self._expert_ranks} "
                "data-parallel ranks over which experts can be sharded. Use "
                f"{_divisors(self._expert_ranks)}.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return (self.pipeline, self.data_replicate, self.data_shard, self.context, self.tensor)

    @property
    def _expert_ranks(self) -> int:
        """Ranks that may divide experts: those that shard, or all replicas if nothing does."""
        # At ZeRO stage 0 nothing shards, and replicas may divide experts all the same.
        return (self.data_shard if self.data_shard > 1 else self.data_replicate) * self.context

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Sizes in the order of `EXPERT_AXES`."""
        left = self._expert_ranks // self.expert
        # Ranks left after ``ep``: they hold copies of the same experts, sharded or whole.
        copies, shards = (self.data_replicate, left) if self.data_shard > 1 else (left, 1)
        return (self.pipeline, copies, shards, self.expert, self.tensor)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """Number of replicas that see different samples."""
        return self.data_replicate * self.data_shard

    @property
    def shares(self) -> int:
        """Number of parts, with tokens of their own, into which a batch of all replicas is cut."""
        return self.data * self.context

    def exchanged_rows(self, chosen: float, max_rows: int | None) -> float:
        """Return the rows of a rank in an all-to-all over ``ep``, those that stay included.

        Args:
            chosen: Rows that its tokens chose.
            max_rows: Rows of the part for every rank, by padding; None: those that tokens chose,
                of which as many arrive as leave if routing is even.
        """
        return chosen if max_rows is None or self.expert == 1 else self.expert * max_rows

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a global rank on every axis; needs no process group.

        Args:
            rank: Global rank, 0 .. world_size - 1.
        """
        place = {}
        # The last axis varies fastest.
        for axis, size in reversed(list(zip(AXES, self.shape, strict=True))):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Return which replica, 0 .. data - 1, a global rank belongs to."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.data_shard + place["dp_shard"]

    def describe(self, rank: int) -> str:
        """Return ``rank 5 (pp 1, tp 1)`` for a global rank."""
        place, sizes = self.coordinates(rank), zip(AXES, self.shape, strict=True)
        parts = ", ".join(f"{axis} {place[axis]}" for axis, size in sizes if size > 1)
        return f"rank {rank} ({parts})" if parts else f"rank {rank}"

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """Return the lists of global ranks that differ only in `axes`, each in rank order.

        Args:
            axes: Names out of `AXES`.
        """
        chosen = set(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            key = tuple(place[a] for a in AXES if a not in chosen)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        named = zip(AXES, self.shape, strict=True)
        return " x ".join(f"{axis} {size}" for axis, size in named if size > 1) or "1 device"


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _divisors(number: int) -> str:
    """Return ``one of 1, 2 or 4``."""
    found = [n for n in range(1, number + 1) if number % n == 0]
    return f"one of {either(found)}" if len(found) > 1 else "1"


_PLANNED = (
    "a command or your code asked for the sizes of the mesh before trainer.fit. But auto_parallel "
    "chooses the parallel sizes when trainer.fit sets up the model, so they are not known yet. Run "
    "lightning-par search --samples N, which prints the fastest parallel sizes for N samples a "
    "step, and pass these sizes to Hybrid3DStrategy."
)


def fit_sizes(
    *,
    num_devices: int,
    devices_per_node: int,
    tensor: Size = "auto",
    tensor_across_nodes: bool = False,
    pipeline: Size = "auto",
    data: Size = "auto",
    data_replicate: Size = "auto",
    context: Size = "auto",
    expert: Size = "auto",
    zero_stage: int = 1,
    auto: AutoRule = "balanced",
) -> ParallelSizes:
    """Fill in every ``"auto"`` and check that the sizes fit the devices.

    The rules for sizes left to ``"auto"``, of the devices that the given sizes leave over:
    ``tensor`` takes all of a node for `tensor`; ``pipeline`` takes all for `pipeline`; ``balanced``
    takes 2 for `tensor`, then 2 for `pipeline`, where they divide; ``context`` takes all for
    `context`, which is 1 under the other rules; ``data`` takes none. What is still left goes to
    `data`. ``planned`` leaves sizes open until a model is there.

    Args:
        num_devices: Ranks in the world.
        devices_per_node: Ranks on one node; `tensor` has to divide it, unless it may be larger.
        tensor: Size of ``tp``.
        tensor_across_nodes: Whether it may be larger than a node.
        pipeline: Size of ``pp``.
        data: Number of data-parallel replicas, ``dp_replicate * dp_shard``.
        data_replicate: Of those, the size of ``dp_replicate``. "auto": all at ZeRO stage 0, else 1.
        context: Size of ``cp``.
        expert: Size of ``ep``. "auto": 1.
        zero_stage: 0 keeps every replica whole, 1 to 3 shard.
        auto: The rule above.

    Raises:
        MeshError: With every problem, and sizes that would work; or the rule is ``planned``.
    """
    if auto == "planned":
        raise MeshError("LP106", _PLANNED)
    given: Mapping[str, Size] = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
        "context_parallel_size": context,
    }
    other = {"data_parallel_replicate_size": data_replicate, "expert_parallel_size": expert}
    _check_values({**given, **other}, zero_stage)
    fixed = math.prod(int(v) for v in given.values() if v != "auto")
    if num_devices % fixed:
        raise MeshError("LP102", _misfit(given, fixed, num_devices))
    left = num_devices // fixed
    # In this order: tensor parallelism first, as it has to stay inside a node.
    tp, left = _take(tensor, left, auto, "tensor", devices_per_node)
    pp, left = _take(pipeline, left, auto, "pipeline", left)
    if context == "auto" and auto != "context":
        context = 1
    cp, left = _take(context, left, auto, "context", left)
    dp, left = (left, 1) if data == "auto" else (data, left)
    if left != 1:
        raise MeshError("LP102", _unused(given, tp, pp, cp, dp, num_devices))
    # Stage 0 shards nothing: all replicas are whole copies.
    replicate = (dp if zero_stage == 0 else 1) if data_replicate == "auto" else data_replicate
    most = num_devices if tensor_across_nodes else devices_per_node
    problems = _check_fit(tp, most, dp, replicate, zero_stage)
    raise_problems(MeshError, "LP103", problems)
    return ParallelSizes(
        pipeline=pp,
        data_replicate=replicate,
        data_shard=dp // replicate,
        context=cp,
        tensor=tp,
        expert=1 if expert == "auto" else expert,
    )


def _check_values(given: Mapping[str, Size], zero_stage: int) -> None:
    problems = [
        f"{name}={value!r} must be a whole number of 1 or more, or 'auto'."
        for name, value in given.items()
        if value != "auto" and not is_count(value)
    ]
    if zero_stage not in (0, 1, 2, 3):
        problems.append(f"zero_stage={zero_stage!r} must be 0, 1, 2 or 3.")
    raise_problems(MeshError, "LP101", problems)


def _check_fit(tp: int, node: int, dp: int, replicate: int, zero_stage: int) -> list[str]:
    problems = []
    if node % tp:
        problems.append(
            f"tensor_parallel_size={tp} does not divide the {node} devices of a node; use "
            f"{_divisors(node)}, or tensor_parallel_across_hosts=True, which is slow."
        )
    if dp % replicate:
        problems.append(
            f"data_parallel_replicate_size={replicate} does not divide data_parallel_size={dp}; "
            f"use {_divisors(dp)}."
        )
    elif zero_stage == 0 and replicate != dp:
        problems.append(
            f"data_parallel_replicate_size={replicate} has no effect with zero_stage=0, which "
            f"shards nothing over the {dp} replicas. Leave data_parallel_replicate_size out, or "
            "use zero_stage=1, 2 or 3."
        )
    return problems


def _take(size: Size, left: int, auto: AutoRule, axis: str, most: int) -> tuple[int, int]:
    if size != "auto":
        return size, left
    if auto == axis:
        # The largest size that divides both the devices left and the limit.
        chosen = math.gcd(left, most)
    else:
        chosen = 2 if auto == "balanced" and left % 2 == 0 and most % 2 == 0 else 1
    return chosen, left // chosen


def _product(given: Mapping[str, Size]) -> str:
    return " x ".join(f"{name}={value}" for name, value in given.items() if value != "auto")


def _misfit(given: Mapping[str, Size], fixed: int, num_devices: int) -> str:
    """Say that the product of the given sizes does not divide the number of devices."""
    # The nearest numbers of devices that would do.
    below = num_devices // fixed * fixed
    counts = f"{below} or {below + fixed}" if below else str(fixed)
    hint = " (on the CPU, devices='auto' means 1)" if num_devices == 1 else ""
    return (
        f"{_product(given)} needs {fixed} devices or a multiple, but the Trainer has "
        f"{num_devices}. Use {counts} devices{hint}, or sizes whose product is "
        f"{_divisors(num_devices)}."
    )


def _unused(given: Mapping[str, Size], tp: int, pp: int, cp: int, dp: int, num_devices: int) -> str:
    """Say that a given `data_parallel_size` leaves devices without work."""
    chosen = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    if cp > 1:
        chosen["context_parallel_size"] = cp
    by_auto = [f"{n}={v}" for n, v in chosen.items() if given[n] == "auto"]
    note = f" (with {' and '.join(by_auto)}, chosen by 'auto')" if by_auto else ""
    needs = math.prod(chosen.values()) * dp
    return (
        f"{_product(given)}{note} needs exactly {needs} devices, but the Trainer has "
        f"{num_devices}. Use {needs} devices, or data_parallel_size={num_devices // needs * dp} "
        "or 'auto'."
    )
