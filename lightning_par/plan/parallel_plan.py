"""What a model declares so that every strategy can place it: the `ParallelPlan`.

A plan is a value. It names parts of a model by their fully qualified names (FQN, as in
`named_modules`) and is complete for all mesh axes; the mesh decides which parts of it apply. In a
pattern, ``*`` stands for exactly one component: ``blocks.*.attention`` matches
``blocks.0.attention`` and nothing below it.
"""

import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_par.errors import nearest, PlanError, raise_problems
from lightning_par.plan.tensor_styles import TENSOR_STYLES, TensorStyle

__all__ = ["BatchLayout", "ParallelPlan", "TensorStyle", "match_pattern"]


def match_pattern(pattern: str, fqn: str) -> bool:
    """Tell whether `fqn` has the form of `pattern`, component by component.

    Args:
        pattern: Components separated by dots; each may hold the wildcards of `fnmatch`.
        fqn: A fully qualified name.
    """
    wanted, given = pattern.split("."), fqn.split(".")
    # A wildcard stands for one component: `fnmatch` alone would let it match dots.
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


class _Frozen(dict[str, Any]):
    """A dict that cannot be changed; unlike `MappingProxyType` it can be hashed and pickled."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "a ParallelPlan does not support item assignment. Make a new plan with "
            "dataclasses.replace(plan, field=...)."
        )

    __delitem__ = __ior__ = __setitem__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return _Frozen, (dict(self),)


def _names(where: str, value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise PlanError(
            "LP202",
            f"{where}={value!r} must be a tuple of names, not one string. Write "
            f"{where}=({value!r},).",
        )
    return tuple(value)


def _refuse_unknown(kind: type, values: Mapping[str, Any]) -> None:
    fields = list(getattr(kind, "__dataclass_fields__"))  # noqa: B009
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise PlanError(
            "LP202",
            f"{kind.__name__} has no field {', '.join(unknown)}. Its fields are {', '.join(fields)}"
            + nearest(unknown[0], fields, cutoff=0.6),
        )


def _as_code(value: Any, indent: str) -> str:
    """Write a plan, or a value in one, as source; texts in double quotes, as formatters want."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        items = ", ".join(_as_code(item, indent) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    inner = indent + "    "
    if isinstance(value, Mapping):
        lines = [f"{_as_code(k, inner)}: {_as_code(v, inner)}" for k, v in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, ParallelPlan | BatchLayout):
        given = {f.name: getattr(value, f.name) for f in fields(value)}
        # Defaults are left out, so that what is printed is what was said.
        changed = {n: v for n, v in given.items() if v != getattr(type(value)(), n)}
        lines = [f"{n}={_as_code(v, inner)}" for n, v in changed.items()]
        opening, closing = f"{type(value).__name__}(", ")"
    else:
        return repr(value)
    body = "".join(f"{inner}{line},\n" for line in lines)
    return f"{opening}\n{body}{indent}{closing}" if lines else opening + closing


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Where the labels and the sequence dims of a batch are, and how its loss is made of those of
    its parts.

    An entry is the key of a mapping, the name of an attribute, or the index of a tuple as text
    (``"0"``); nested entries are joined by dots. What is left out is found in the first batch.

    Attributes:
        sequence_dims: Batch entry -> the dim that holds its T tokens.
        labels: The entry that holds the labels, or None: then every sample counts the same.
        ignore_index: Labels of this value do not count.
        label_shift: How many labels at the start of T the model drops (1 where it shifts by
            itself).
        shifted: An entry that holds the labels shifted already, where a batch has it; then the
            model takes it under that keyword and drops none. Where sequences are divided, labels
            are shifted before, and given so.
        optional: Entries of `sequence_dims` that a batch may lack.
        whole: Entries without a batch dim, which are never cut: class weights, tables.
        batch_dims: Batch entry -> its batch dim, where that is not dim 0, or not to be seen from
            the shapes. A list of one value per sample has the dim 0.
        loss_weight: What one part of a batch weighs in the loss of the whole: ``"labels"`` (the
            mean over the labels that count), ``"samples"`` (the mean over the samples), ``"sum"``
            (the sum of the losses of the parts), the name of an entry (the mean weighted by the sum
            of its values), or a function of a batch that returns a number. None: "labels" or
            "samples", by `labels`, which the first training step checks on a few samples.
        local_statistics: Whether layers that normalize over the batch in training (BatchNorm) may
            take the samples of one micro-batch of one replica for the batch.

    Examples:
        >>> layout = BatchLayout(sequence_dims={"ids": 1, "labels": 1}, labels="labels")
    """

    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    labels: str | None = None
    ignore_index: int = -100
    label_shift: int = 0
    shifted: str | None = None
    optional: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    loss_weight: str | Callable[[Any], Any] | None = None
    local_statistics: bool = False

    def __post_init__(self) -> None:
        # Frozen dataclasses set their own fields so.
        for name in ("optional", "whole"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in ("sequence_dims", "batch_dims"):
            object.__setattr__(self, name, _Frozen(getattr(self, name)))
        both = sorted({*self.whole} & {*self.batch_dims})
        if both:
            raise PlanError(
                "LP202",
                f"BatchLayout names the batch entries {', '.join(both)} both in whole= and in "
                "batch_dims=. An entry in whole= has no batch dim. Name each entry in one of the "
                "two.",
            )
        if self.loss_weight == "labels" and self.labels is None:
            raise PlanError(
                "LP202",
                "loss_weight='labels' needs labels=, the name of the batch entry that holds "
                "the labels.",
            )
        if self.label_shift < 0:
            raise PlanError("LP202", f"label_shift={self.label_shift} must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model may be cut, declared once, for every mesh axis.

    Attributes:
        blocks: FQN of the container (`nn.ModuleList`) of repeated blocks: pipeline cuts, units of
            sharding and of compilation. Several, in the order in which they run, where a model
            passes through one after the other, as through an encoder and a decoder. None: the model
            cannot be cut into pipeline stages.
        first: FQNs used only before the blocks. What stands before the container is "first" by
            itself.
        last: FQNs used only after the blocks. What stands after the container is "last" by itself.
        replicated: FQNs that every pipeline stage holds; their gradients are summed over the
            stages. What stands between two containers is "replicated" by itself.
        tied: Groups of parameter FQNs that are one parameter. Ties are also found by identity.
        carried: Attributes (tensors) that a block stores on itself and that code after the blocks
            reads.
        kept: FQNs of blocks whose output code after later blocks reads, besides the next block. It
            crosses the boundaries of stages whole. The last block of every container is kept.
        tensor: FQN pattern -> `TensorStyle`; the empty pattern is the model itself.
        divided: FQN pattern -> attributes that count heads or features, lowered to the local count.
        batch: Where labels and sequence dims are.
        experts: FQN patterns of modules whose parameters have one entry per expert in dim 0, and
            whose ``compute(rows, counts, beside)`` maps rows sorted by expert, which padding may
            follow where `expert_max_rows` is given. Or they have ``num_experts``, and take tokens,
            the experts of each and the weights of these, as experts of transformers do.
        replica_sums: FQN patterns of modules whose output, a tensor without a gradient, is summed
            over the replicas in training. Or a model of transformers whose loss balances experts;
            the empty pattern is the model itself.
        checkpointable: FQN patterns of parts whose activations may be recomputed.
        positions: FQN pattern -> the keyword of its `forward` that takes the place of every token
            in its sequence, [1, T]; the empty pattern is the model itself. Where sequences are
            divided, it is filled in. Empty: the model needs none, or takes them from the batch.
            None: the model may count by itself, so sequences cannot be divided.
        captured: Name of a module inside a block -> which entry of its output code after the blocks
            collects through forward hooks (any number, if it is a tensor). It crosses the
            boundaries of stages.
        counts: FQN pattern -> name and number of what a module counts (heads), where it has no such
            attribute; the tensor-parallel degree has to divide them.
        sequence_region: Where sequence parallelism shards activations: ``"model"``, from the
            embedding to the head; ``"blocks"``, from the input of the first block to the output of
            the last; or ``"none"``, nowhere, as with ``sequence_parallel=False``.
        refusals: ``"pipeline"``, ``"tensor"``, ``"context"``, ``"batch"`` or ``"microbatches"`` ->
            why the model is not cut so, or a batch not divided among replicas and micro-batches, or
            only not among micro-batches, and what to declare.

    Examples:
        >>> plan = ParallelPlan(
        ...     blocks="layers",
        ...     tensor={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
        ... )
    """

    blocks: str | tuple[str, ...] | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    carried: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    batch: BatchLayout = field(default_factory=BatchLayout)
    experts: tuple[str, ...] = ()
    replica_sums: tuple[str, ...] = ()
    checkpointable: tuple[str, ...] = ()
    positions: Mapping[str, str] | None = None
    captured: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sequence_region: Literal["blocks", "model", "none"] = "model"
    refusals: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        for pattern, style in self.tensor.items():
            if style not in TENSOR_STYLES:
                problems.append(
                    f"ParallelPlan(tensor=...) gives {pattern!r} the style {style!r}, which does "
                    f"not exist{nearest(style, TENSOR_STYLES)} Use one of "
                    f"{', '.join(TENSOR_STYLES)}."
                )
        if self.sequence_region not in ("blocks", "model", "none"):
            problems.append(
                f"sequence_region={self.sequence_region!r} must be 'blocks', 'model' or 'none'."
            )
        raise_problems(PlanError, "LP202", problems)
        divided = {k: _names(f"divided[{k!r}]", v) for k, v in self.divided.items()}
        tied = tuple(_names(f"tied[{i}]", group) for i, group in enumerate(self.tied))
        # Hashable, as plans are keys of caches.
        values: dict[str, Any] = {"tensor": _Frozen(self.tensor), "divided": _Frozen(divided)}
        values |= {"tied": tied, "captured": _Frozen(self.captured)}
        values["counts"] = _Frozen({k: _Frozen(v) for k, v in self.counts.items()})
        values["refusals"] = _Frozen(self.refusals)
        values["positions"] = None if self.positions is None else _Frozen(self.positions)
        if self.blocks is not None and not isinstance(self.blocks, str):
            values["blocks"] = _names("blocks", self.blocks)
        names = ("first", "last", "replicated", "carried", "kept", "experts", "replica_sums")
        for name in (*names, "checkpointable"):
            values[name] = _names(name, getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def containers(self) -> tuple[str, ...]:
        """FQNs of the containers of blocks, in the order in which they run."""
        if self.blocks is None:
            return ()
        return (self.blocks,) if isinstance(self.blocks, str) else self.blocks

    def under(self, prefix: str) -> "ParallelPlan":
        """Return the same plan as seen from a parent, in which the model stands at `prefix`.

        Args:
            prefix: FQN of the model inside the parent; the empty string changes nothing.
        """
        if not prefix:
            return self
        dot = prefix + "."
        return replace(
            self,
            blocks=dot + self.blocks
            if isinstance(self.blocks, str)
            else self.blocks and tuple(dot + f for f in self.blocks),
            first=tuple(dot + f for f in self.first),
            last=tuple(dot + f for f in self.last),
            replicated=tuple(dot + f for f in self.replicated),
            kept=tuple(dot + f for f in self.kept),
            tied=tuple(tuple(dot + f for f in group) for group in self.tied),
            tensor={dot + k if k else prefix: v for k, v in self.tensor.items()},
            divided={dot + k: v for k, v in self.divided.items()},
            counts={dot + k: v for k, v in self.counts.items()},
            experts=tuple(dot + f for f in self.experts),
            replica_sums=tuple(dot + f if f else prefix for f in self.replica_sums),
            checkpointable=tuple(dot + f for f in self.checkpointable),
            positions=None
            if self.positions is None
            else {dot + k if k else prefix: v for k, v in self.positions.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists and strings, ready for JSON or YAML.

        A `loss_weight` that is a function is written as ``"module:function"``.
        """
        shallow = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shallow["batch"] = {n: getattr(self.batch, n) for n in self.batch.__dataclass_fields__}
        weight = self.batch.loss_weight
        if callable(weight):
            shallow["batch"]["loss_weight"] = f"{weight.__module__}:{weight.__qualname__}"
        # By JSON, so that tuples and frozen dicts become lists and dicts at every depth.
        plain: dict[str, Any] = json.loads(json.dumps(shallow, default=dict))
        return plain

    def as_code(self) -> str:
        """Return the plan as Python source, without the fields that have their defaults.

        Examples:
            >>> print(ParallelPlan(blocks="layers").as_code())
            ParallelPlan(
                blocks="layers",
            )
        """
        return _as_code(self, "")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ParallelPlan":
        """Return the plan that `to_dict` wrote.

        Args:
            values: Field name -> value; `batch` may be a mapping.

        Raises:
            PlanError: A key is not a field of the plan.
        """
        _refuse_unknown(cls, values)
        batch = values.get("batch", {})
        if not isinstance(batch, BatchLayout):
            _refuse_unknown(BatchLayout, batch)
            weight = batch.get("loss_weight")
            if isinstance(weight, str) and ":" in weight:
                # "module:function", as `to_dict` wrote it.
                batch = {**batch, "loss_weight": pkgutil.resolve_name(weight)}
            batch = BatchLayout(**batch)
        return cls(**{**values, "batch": batch})

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
