"""`infer_plan`: the plan of a model by its structure, for models that declare none."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_par.errors import LightningParError
from lightning_par.inference.batch_layout import read_layout, token_entries
from lightning_par.inference.examples import runs_of
from lightning_par.inference.forked import run_forked
from lightning_par.inference.pipeline_cut import Cut, find_cut, frozen_parameters
from lightning_par.inference.tensor_groups import (
    find_groups,
    Groups,
    is_linear,
    owners_of,
    signature,
)
from lightning_par.inference.tensor_proof import prove_styles
from lightning_par.observe.recorder import Call, Trace, trace_forward
from lightning_par.plan.parallel_plan import BatchLayout, match_pattern, ParallelPlan
from lightning_par.plan.resolved_plan import canonical_names
from lightning_par.plan.tensor_styles import TENSOR_STYLES, TensorStyle

__all__ = ["describe_inferred", "infer_here", "infer_plan", "refuse_all"]

_DROPS_SAMPLES = re.compile("droppath|stochasticdepth", re.IGNORECASE)
_MISTAKES = (ArithmeticError, AssertionError, ImportError, LookupError, NameError, OSError)
"""Exceptions of a step that come from its own code, whoever runs it."""
_DECLARE = (
    "To divide the model by a plan of your own instead, declare parallel_plan() on it, or pass "
    "plan= to the strategy."
)


def infer_plan(
    model: nn.Module,
    *,
    example: Any = None,
    tensor_parallel_size: int = 2,
    pipeline_parallel_size: int = 2,
) -> ParallelPlan:
    """Return the plan that a model's structure suggests; `ParallelPlan.as_code` writes it down.

    A forward is traced, in a fork of this process. A container is cut into stages if every block is
    called once, in order, and reads nothing of a stage that it does not get. Pairs of linear layers
    are sharded if the module around them, run on simulated ranks, computes the same; all other
    layers stay whole. What is not understood is refused, with the reason, when a mesh asks for it.

    Args:
        model: A module, perhaps a LightningModule; parameters may be on meta. It is not changed.
        example: Of a module with a `training_step`, a batch for it; of any other, a tuple of
            arguments, a mapping of keyword arguments or the only argument. Shapes and dtypes count,
            values may. None: the model's `example_input_array`, or a guess from its first layers.
        tensor_parallel_size: Degree for which the tensor styles are proven, 2 or more; layers that
            do not divide by it stay whole.
        pipeline_parallel_size: Number of stages for which the blocks are chosen, 2 or more.

    Returns:
        FQNs as seen from `model`. Without a trace, only a plan that refuses.

    Raises:
        ForkError: This process has run a backward on a GPU, after which no fork can.
    """
    return run_forked(
        partial(
            infer_here,
            model,
            example=example,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
    )


def infer_here(
    model: nn.Module,
    *,
    example: Any,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    step: str = "training_step",
    without_example: str = "the arguments of its forward are not known; pass example=",
    blocks: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> ParallelPlan:
    """Return the plan as `infer_plan` does, in this process.

    Args:
        model: See `infer_plan`.
        example: See `infer_plan`.
        tensor_parallel_size: See `infer_plan`.
        pipeline_parallel_size: See `infer_plan`.
        step: Which step of a LightningModule is traced.
        without_example: Why there is no example, if there is none.
        blocks: FQNs of containers that are given; the plan keeps them.
        dtype: See `trace_forward`.
    """
    trace, reason = _find_trace(model, example, step, without_example, dtype)
    if trace is None:
        return refuse_all(model, reason)
    if blocks:
        # Containers that are given are taken as they are; only several are no single unit of
        # styles.
        cut = Cut(containers=tuple(blocks) if len(blocks) == 1 else ())
    else:
        cut = find_cut(model, trace, max(2, pipeline_parallel_size))
    # Of a forward alone, nobody knows which entry of a batch an argument is.
    is_step = example is not None and hasattr(model, step)
    layout = read_layout(trace) if is_step else BatchLayout()
    styles = _Styles(model, trace, cut, max(2, tensor_parallel_size), _tokens(trace, layout))
    refusals = {}
    if cut.refusal:
        refusals["pipeline"] = f"no plan could be inferred. {cut.refusal} {_DECLARE}"
    if styles.refusal:
        refusals["tensor"] = f"no plan could be inferred. {styles.refusal} {_DECLARE}"
    names = [name for name, _ in model.named_modules()]
    return ParallelPlan(
        blocks=cut.blocks,
        first=cut.first,
        last=cut.last,
        replicated=cut.replicated,
        kept=cut.kept,
        tensor={} if styles.refusal else _compress(styles.styles, names),
        divided={} if styles.refusal else _compress(styles.divided, names),
        batch=layout,
        sequence_region="blocks" if styles.cuts_tokens else "none",
        refusals=refusals,
    )


def refuse_all(model: nn.Module, reason: str) -> ParallelPlan:
    """Return a plan that refuses to divide a model.

    Args:
        model: The model.
        reason: Why no plan could be inferred: a sentence.
    """
    text = f"no plan could be inferred for {type(model).__name__}: {reason} {_DECLARE}"
    return ParallelPlan(refusals={"pipeline": text, "tensor": text})


def describe_inferred(plan: ParallelPlan, model: nn.Module) -> str:
    """Return an inferred plan as Python source, and what keeps layers from being divided further.

    Args:
        plan: What `infer_plan` gave.
        model: For which it gave it.
    """
    code = f"{plan.as_code()}{_describe_frozen(plan, model)}"
    gathered = [name for name, style in plan.tensor.items() if style == "colwise_gather_output"]
    if not gathered:
        return code
    stacked = [name for name in gathered if _stacks_three(name, model)]
    why = (
        "If the code after one of them is attention, its heads can stay sharded if it writes "
        "reshape(b, t, -1), and not a fixed width, and takes the size of a head from a tensor, "
        "as in q.shape[-1] ** -0.5, and not from the number of heads."
    )
    if stacked:
        why = (
            f"{', '.join(stacked)} computes query, key and value in one Linear, and chunk or "
            "split needs its whole output. The heads can stay sharded if there is one Linear for "
            "each of the three, and if the code writes reshape(b, t, -1) after the attention and "
            "takes the size of a head from a tensor, as in q.shape[-1] ** -0.5."
        )
    return (
        f"{code}\nThe outputs of {', '.join(gathered)} are gathered, since the code "
        f"after them needs their whole width. {why}"
    )


def _describe_frozen(plan: ParallelPlan, model: nn.Module) -> str:
    """Return what frozen modules cost that every stage holds; nothing if there are none."""
    held = {name: frozen_parameters(model, name) for name in plan.replicated}
    frozen = {name: parameters for name, parameters in held.items() if parameters}
    if not frozen:
        return ""
    size = sum(p.nbytes for each in frozen.values() for p in each) / 2**20
    return (
        "\n"
        f"Every stage of a pipeline holds the frozen {', '.join(frozen)} ({size:.1f} MiB), since "
        "a step or an evaluation may call it on any stage. If it is called only after the "
        "blocks, or never, let the last stage alone hold it: declare "
        f"ParallelPlan(last={tuple(frozen)!r})."
    )


def _stacks_three(pattern: str, model: nn.Module) -> bool:
    """Tell whether a Linear gives three times its input, as one for query, key and value does."""
    found = (part for name, part in model.named_modules() if match_pattern(pattern, name))
    return any(isinstance(p, nn.Linear) and p.out_features == 3 * p.in_features for p in found)


def _tokens(trace: Trace, layout: BatchLayout) -> dict[str, int]:
    return {n: size for n, size in token_entries(trace).items() if n in layout.sequence_dims}


def _find_trace(
    model: nn.Module, example: Any, step: str, without_example: str, dtype: torch.dtype | None
) -> tuple[Trace | None, str]:
    """Return the first trace that succeeds, or why none did."""
    reason = "" if example is not None else without_example
    mistake: Exception | None = None
    for run, given in runs_of(model, example, step):
        try:
            trace = trace_forward(model, run, given, dtype)
        # A message for the user, as of a plan that does not fit: it says more than a refusal.
        except LightningParError:
            raise
        except Exception as error:  # whatever a stranger's forward raises
            is_step = example is not None and hasattr(model, step)
            if is_step and isinstance(error, _MISTAKES):
                # A mistake of the step itself would come up in the run as well: it is raised at
                # the end.
                mistake = mistake or error
            what = step if is_step else "forward"
            reason = f"its {what} could not be traced ({type(error).__name__}: {error})"
            if example is None:
                reason = f"{without_example}, and {reason}"
            continue
        if trace.result:
            return trace, ""
        reason = f"its {step} returns no tensor"
    if mistake is not None:
        raise mistake
    return None, f"{' '.join(reason.split())[:400]}."


class _Styles:
    """The tensor styles of a model.

    Attributes:
        styles: FQN -> style, for every module that holds parameters.
        divided: FQN -> attributes.
        cuts_tokens: Whether sequence parallelism was proven for the blocks.
        refusal: Why there are none.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, cut: Cut, ranks: int, tokens: Mapping[str, int]
    ) -> None:
        self.model, self.trace, self.cut, self.ranks = model, trace, cut, ranks
        self.owners = owners_of(model)
        self.refusal, self.cuts_tokens = "", False
        self._own_styles: dict[str, TensorStyle] = {}
        whole = self._read_from_outside()
        groups = Groups() if self.refusal else find_groups(model, trace, ranks, whole)
        self.divided = groups.divided
        # Later ones win: what reads parameters from outside stays whole.
        self.styles: dict[str, TensorStyle] = {**groups.styles, **self._own_styles}
        if self.refusal:
            return
        # Blocks under sequence parallelism, or else layers whose outputs are gathered.
        self.cuts_tokens = self._divide_tokens(groups, tokens)
        if not self.cuts_tokens:
            self._gather_outputs(whole)
        self._shard_vocabulary(whole)
        for owners in self.owners.values():
            for owner in owners:
                # Sequence parallelism wants a style for everything that holds parameters.
                self.styles.setdefault(owner, "replicated")

    def _read_from_outside(self) -> frozenset[str]:
        """Find modules that read parameters of modules inside them; all of that stays whole.

        Parameters stand for this rank's shards inside the forward of their own module only.
        """
        names = [name for name, _ in self.model.named_modules()]
        whole: set[str] = set()
        for operation in self.trace.operations:
            active = [self.trace.calls[number].fqn for number in operation.calls]
            for value in operation.inputs:
                is_read = value.kind in ("parameter", "made") and value.name in self.owners
                # A module's own forward reads its own parameters.
                if not is_read or self.owners[value.name] & {*active}:
                    continue
                if not active:
                    continue  # the step itself, which reads it whole, see ParameterReads
                reader = active[-1]
                dot = f"{reader}." if reader else ""
                inside = any(owner.startswith(dot) for owner in self.owners[value.name])
                blocks = [f"{container}." for container in self.cut.containers]
                if not inside or any(b.startswith(dot) for b in blocks):
                    self.refusal = (
                        f"The parameter {value.name} is read by the forward of "
                        f"{reader or 'the model'} and not by the forward of its own module. A "
                        "shard of a parameter can be used only in the forward of the module that "
                        "owns the parameter."
                    )
                    return frozenset()
                self._own_styles[reader] = "replicated_inside"
                whole |= {n for n in names if n == reader or n.startswith(dot)}
        return frozenset(whole)

    def _block_calls(self) -> Iterator[Call]:
        for container in self.cut.containers:
            for name, _ in self.model.get_submodule(container).named_children():
                yield from self.trace.calls_of(f"{container}.{name}")

    def _divide_tokens(self, groups: Groups, tokens: Mapping[str, int]) -> bool:
        """Prove every block under sequence parallelism; only then activations are cut along T."""
        calls = list(self._block_calls())
        lengths = set(tokens.values())
        # One length of tokens, and nothing between or beside the blocks that needs them whole.
        if not calls or len(lengths) != 1 or self._own_styles or self.cut.kept:
            return False
        # The output of one block is the very input of the next.
        if any(two.inputs[:1] != one.outputs[:1] for one, two in pairwise(calls)):
            return False  # code between two blocks, which may want all tokens
        if len({type(call.module) for call in calls}) > 1 or any(
            _DROPS_SAMPLES.search(type(m).__name__) for c in calls for m in c.module.modules()
        ):
            return False
        proven: dict[str, frozenset[str] | None] = {}
        found: dict[str, TensorStyle] = {}
        first = {id(module): name for name, module in self.model.named_modules()}
        for call in calls:
            hidden = call.inputs[0] if call.inputs else None
            if hidden is None or hidden.shape[1:2] != (next(iter(lengths)),):
                return False
            dot = call.fqn + "."
            styles = {n[len(dot) :]: s for n, s in groups.styles.items() if n.startswith(dot)}
            divided = {n[len(dot) :]: a for n, a in groups.divided.items() if n.startswith(dot)}
            key = signature(call)
            # Equal blocks are proven once.
            if key not in proven:
                proof = prove_styles(call, styles, divided, self.ranks, sequence_parallel=True)
                proven[key] = None if proof is None or not styles else proof.partial
            partial = proven[key]
            if partial is None:
                return False
            for name, _ in call.module.named_parameters(remove_duplicate=False):
                owner, _, own = name.rpartition(".")
                if owner in styles:
                    spec = TENSOR_STYLES[styles[owner]]
                    is_summed = spec.partial_gradients != "never" and spec.sharded_dim(own) is None
                    # What was proven for each rank's part has to be what the style will sum.
                    if is_summed != (name in partial):
                        return False
                    continue
                style: TensorStyle = "sequence_parallel" if name in partial else "replicated"
                # Of a module that several blocks share, plans know the first name.
                fqn = first[id(call.module.get_submodule(owner))]
                if name in partial and not self.cut.holds(fqn):
                    return False
                if found.setdefault(fqn, style) != style:
                    return False
        self.styles |= found
        return True

    def _gather_outputs(self, whole: frozenset[str]) -> None:
        """Shard linear layers before and in the blocks that are in no group, gather their outputs.

        That is right for any layout of heads, since what follows is computed whole on every rank.
        """
        containers = [f"{n}." for n, s in self.styles.items() if s == "gather_sequence"]
        shared = {o for owners in self.owners.values() if len(owners) > 1 for o in owners}
        # In the blocks and before them; what follows may want shards, as a head its vocabulary.
        end = max((call.number for call in self._block_calls()), default=len(self.trace.calls))
        for name, module in self.model.named_modules():
            calls = self.trace.calls_of(name)
            if (
                is_linear(module)
                and calls
                and (calls[0].number < end or any(n == end for n in calls[0].outer))
                and name not in whole | shared
                and name not in self.styles
                and not name.startswith(tuple(containers))
                and module.out_features % self.ranks == 0
            ):
                self.styles[name] = "colwise_gather_output"

    def _shard_vocabulary(self, whole: frozenset[str]) -> None:
        """Shard tables that look up tokens of the batch, and heads that give their logits."""
        first = canonical_names(self.model)  # under which `owners` has a tied parameter
        for operation in self.trace.operations:
            if operation.name != "embedding" or not operation.calls:
                continue
            call = self.trace.calls[operation.calls[-1]]
            table, ids = call.module, operation.inputs[0]
            if not isinstance(table, nn.Embedding) or call.fqn in whole or ids.kind != "input":
                continue
            # Tables with these options change or scale rows by what all ranks look up.
            plain = table.max_norm is None and not table.sparse and not table.scale_grad_by_freq
            # A norm inside of a table would get the tokens of one shard only.
            plain = plain and len([*table.parameters()]) == 1
            single = len(self.trace.calls_of(call.fqn)) == 1 and ids.dtype == torch.long
            heads = self._heads(table.num_embeddings)
            tied = self.owners.get(first.get(f"{call.fqn}.weight", ""), frozenset())
            # A tie counts only if all that hold it are table or head.
            if plain and single and tied and tied <= {call.fqn, *heads} and not tied & whole:
                self.styles[call.fqn] = "vocab_embedding"
                for head in heads:
                    # Not the head of another table, which decides for both.
                    own = self.owners[first[f"{head}.weight"]] <= {head, *tied}
                    if own and head not in whole:
                        self.styles[head] = "vocab_head"

    def _heads(self, size: int) -> list[str]:
        """Return linear layers outside of the blocks that give `size` numbers."""
        return [
            name
            for name, module in self.model.named_modules()
            if is_linear(module)
            and module.out_features == size
            and len(self.trace.calls_of(name)) == 1
            and self.styles.get(name, "replicated") in ("replicated", "colwise_gather_output")
            and not self.cut.holds(name)
        ]


def _compress(found: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Put patterns in the place of FQNs that differ in numbers only, in the order of the model."""
    order = {name: place for place, name in enumerate(names)}
    patterns: dict[str, Any] = {}
    for fqn in sorted(found, key=lambda name: order[name]):
        if any(match_pattern(pattern, fqn) for pattern in patterns):
            continue
        # The widest pattern that names nothing else, and nothing that another one names.
        for pattern in _candidates(fqn):
            hits = [
                name for name in names if (name or not pattern) and match_pattern(pattern, name)
            ]
            alike = all(name in found and found[name] == found[fqn] for name in hits)
            if alike and not any(match_pattern(p, hit) for p in patterns for hit in hits):
                patterns[pattern] = found[fqn]
                break
    return patterns


def _candidates(fqn: str) -> Iterator[str]:
    """Give patterns of a name, the widest first."""
    parts = fqn.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    for kept in range(len(numbers) + 1):
        wild = numbers[: len(numbers) - kept]
        yield ".".join("*" if i in wild else part for i, part in enumerate(parts))
