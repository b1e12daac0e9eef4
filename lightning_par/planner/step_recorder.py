"""Records the operators of a step by the part of a model that calls them: see `block_trace`.

Length: every kind of operator adds to the same part, and asks for the same regions and tensors.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.engine.tensor.chunked_logits import ChunkedLogits
from lightning_par.observe.flops import FlopCounter
from lightning_par.observe.recorder import called_around, tensors_in
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import StyleSpec, TENSOR_STYLES
from lightning_par.planner.model_parts import (
    Amount,
    Attention,
    Cut,
    ModelPart,
    Product,
)
from lightning_par.upstream.autograd import is_in_backward
from lightning_par.upstream.dispatch import operator_schema
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.tensor import storage_key

__all__ = ["AFTER", "BEFORE", "RecordedPart", "StepRecorder"]

_LOOKUPS = ("embedding", "index", "index_select", "gather")
"""Operators that read as much of a table as they return."""
_WRITES = ("fill_", "zero_", "copy_", "bernoulli_")
"""Operators that write their first argument without reading it."""
_BACKWARD_TRAFFIC = 34 / 22
"""Words of element-wise work in a backward to those of its forward, as of a block of a transformer:
two norms 12 to 8, two sums with dropout 10 to 14, and two sums of gradients 12, in bytes."""
_BACKWARD_KERNELS = 40 / 22
_PASSES = 5
"""Over the logits of a chunk: written, read for their sum, made probabilities and gradients."""
_FOLLOWED = "lightning_par.followed"
"""Key of the metadata of a node of autograd that has its prehook."""
BEFORE, AFTER = -1, -2
"""Where a step is outside of the blocks, which have numbers."""


@dataclass(eq=False)
class RecordedPart:
    """What is recorded of a part; see `ModelPart`."""

    products: list[Product] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    words: dict[tuple[str, Cut], float] = field(default_factory=dict)
    summed: float = 0.0
    sums: int = 0
    gathered: float = 0.0
    gathers: int = 0
    kernels: int = 0
    operators: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, what: str, cut: Cut, words: float) -> None:
        """Add words to one of the amounts of `ModelPart`."""
        self.words[what, cut] = self.words.get((what, cut), 0.0) + words

    def freeze(self, samples: int, weights: Amount, trained: Amount) -> ModelPart:
        """Return the part, for one sample."""

        def amount(what: str) -> Amount:
            cuts: tuple[Cut, ...] = ("tensor", "tokens", "whole")
            return Amount(*(self.words.get((what, cut), 0.0) / samples for cut in cuts))

        of_traffic = "traffic", "eager", "eager_backward"
        passed = amount("gradient_traffic").times(_BACKWARD_TRAFFIC)
        # Products and attention have counted their own kernels.
        # Negative never: a part of products only has no other kernel.
        small = max(0, self.kernels - len(self.products) - len(self.attentions))
        # A part without anything to train, before the first trained weight, has no backward.
        again = _BACKWARD_KERNELS * bool(passed.total or trained.total)
        of_memory = "saved", "kept", "entered", "logits"
        return ModelPart(
            products=tuple(_for_one(p, samples) for p in self.products),
            attentions=tuple(_for_one(a, samples) for a in self.attentions),
            **{name: amount(name) for name in (*of_traffic, *of_memory)},
            eager_weights=amount("eager_weights").times(samples),
            summed=self.summed / samples,
            sums=self.sums,
            gathered=self.gathered / samples,
            gathers=self.gathers,
            backward_traffic=passed,
            streams=(small, small * _BACKWARD_TRAFFIC),
            kernels=(self.kernels, self.kernels * again),
            operators=(self.operators[0], self.operators[1]),
            weights=weights,
            trained=trained,
        )


# A batch of samples multiplies rows of products, and heads of attention (B N of them).
def _for_one(made: Any, samples: int) -> Any:
    """Return a product or attention of a batch as that of one sample."""
    given = dict(vars(made))
    names = ("rows",) if isinstance(made, Product) else ("heads", "kv_heads")
    return type(made)(**{**given, **{name: given[name] / samples for name in names}})


class StepRecorder(FlopCounter):
    """Records the operators of a step by the part of the model that calls them."""

    def __init__(self, model: nn.Module, resolved: ResolvedPlan, *, backward: bool = False) -> None:
        super().__init__()
        self._model, self._resolved, self._backward = model, resolved, backward
        self._number = {name: number for number, name in enumerate(resolved.block_names)}
        self.parts: dict[int, RecordedPart] = {}
        self.hidden: tuple[int, int] | None = None
        self.classes = 1  # of the loss: V
        self._stack: list[str] = []
        self._place = 0 if not self._number else BEFORE
        self.attends = self.has_chunks = False
        # By the key of a storage; kept alive, as keys are used again.
        self._alive: dict[int, Any] = {}
        self._parameters: dict[int, bool] = {}
        self._sizes = {p.shape for p in model.parameters()}
        self._cuts: dict[int, Cut] = {}
        self._needs: dict[int, bool] = {}
        self._saved: set[int] = set()
        self._logits: set[int] = set()
        self._masks: set[int] = set()
        # Of the node whose backward runs: the part that made it, and the key of what it returned;
        # None: of attention. What adds up gradients has no node: it follows what made them.
        self._running: tuple[int, int] | None = None

    def recorded(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that runs a step and records it."""

        def inside(given: Any) -> Any:
            with ExitStack() as stack:
                # By storage: views and transposes of a weight are the weight.
                for parameter in self._model.parameters():
                    self._parameters[self._key(parameter)] = parameter.requires_grad
                stack.enter_context(self._hooked())
                stack.enter_context(
                    # Every tensor that autograd saves comes by here; nothing is changed.
                    torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
                )
                attend = F.scaled_dot_product_attention
                stack.enter_context(
                    # Twice: `nn.MultiheadAttention` and layers of torch look the function up in
                    # the module F; a model that imported it calls through the mode below.
                    replaced(F, "scaled_dot_product_attention", _Functions(self, attend).call)
                )
                stack.enter_context(_Functions(self, attend))
                stack.enter_context(self)
                result = run(given)
                if self._backward:
                    outputs = [t for t in tensors_in(result) if t.requires_grad]
                    # Of ones: only shapes matter, and any output may be the loss.
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                return result

        return inside

    # Where the step is ----------------------------------------------------------------------------

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        def before(fqn: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(fqn)
            if fqn in self._number:
                self._enter_block(fqn, tensors_in((args, kwargs)))

        def after(fqn: str, _: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()
            self._leave(fqn, tensors_in(output))
            # From here on the head and the loss run.
            if self._resolved.block_names[-1:] == (fqn,):
                self._place = AFTER

        with called_around(self._model, before, after):
            yield

    def _enter_block(self, fqn: str, given: list[Tensor]) -> None:
        self._place = self._number[fqn]
        hidden = next((t for t in given if t.is_floating_point()), None)
        # A block without an input of numbers, as one that gets ids only.
        if hidden is None:
            return
        self._part.add("entered", self._cut(hidden), hidden.numel())
        # [B, T, D] of the first block.
        if self.hidden is None and hidden.ndim == 3:
            self.hidden = hidden.shape[1], hidden.shape[2]

    def _leave(self, fqn: str, outputs: list[Tensor]) -> None:
        """Follow a module of a style: its output is a shard, or is whole again."""
        given = self._style(fqn).output
        # The first tensor is the hidden states; others are side values.
        words = sum(t.numel() for t in outputs[:1])
        if given is None:
            return
        cut: Cut = "tensor"
        if given == "summed":
            # A sum leaves the container, and is scattered along T under sequence parallelism.
            cut = self._region(leaves=True)
            self._part.summed += words
            self._part.sums += 1
        elif given == "gathered":
            cut = self._region()
            self._part.gathered += words
            self._part.gathers += 1
        for tensor in outputs:
            self._cuts[self._key(tensor)] = cut

    @property
    def _part(self) -> RecordedPart:
        return self.parts.setdefault(self._place, RecordedPart())

    def _region(self, leaves: bool = False) -> Cut:
        """Return what divides a tensor that no shard went into.

        Args:
            leaves: Whether it leaves a container of shards, and is cut along T again.
        """
        region = self._resolved.plan.sequence_region
        # `_place < 0`: outside of the blocks.
        if region == "none" or (region == "blocks" and self._place < 0):
            return "whole"
        if leaves:
            return "tokens"
        return "whole" if any(self._style(fqn).inside for fqn in self._stack) else "tokens"

    def _style(self, fqn: str) -> StyleSpec:
        return TENSOR_STYLES[self._resolved.styles.get(fqn, "replicated")]

    # What an operator does ------------------------------------------------------------------------

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._alive.setdefault(key, storage)
        return key

    def _cut(self, tensor: Tensor) -> Cut:
        return self._cuts.get(self._key(tensor)) or self._region()

    def _on_operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, flops: int | None
    ) -> None:
        if is_in_backward():
            self._on_backward(func, tensors_in((args, kwargs)), tensors_in(result), flops)
            return
        # Inside of attention, whose operators stand for one fused kernel.
        if self.attends:
            return
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        name = operator_schema(func).name.rpartition("::")[2]
        new = {self._key(t) for t in made} - {self._key(t) for t in given}
        # No new storage and nothing written: a view moves no memory.
        if not made or not (new or operator_schema(func).is_mutable):
            return  # a view
        activations = [t for t in given if self._key(t) not in self._parameters]
        # One shard among the inputs makes the result a shard.
        sharded = any(self._cuts.get(self._key(t)) == "tensor" for t in activations)
        cut: Cut = "tensor" if sharded else self._region()
        needs = torch.is_grad_enabled() and any(self._is_needed(t) for t in given)
        # `needs` as autograd would have it, for tensors on meta without a graph.
        for key in new:
            self._cuts[key], self._needs[key] = cut, needs
        if flops is None:
            self._move(name, given, made, cut)
        if name == "bernoulli_":  # which a device draws with the product
            self._masks.add(self._key(made[0]))
        # Making room moves nothing.
        elif name.startswith(("empty", "new_empty")) or self._key(made[0]) in self._masks:
            return
        elif flops is not None:
            self._multiply(given, made[0], flops, cut)
        else:
            self._stream(name, given, made, cut, needs)

    def follow(self, result: Any, *, attended: bool = False) -> None:
        """Let the new nodes behind the result of a function say where their backward belongs."""
        if not self._backward:
            return
        # New nodes only: walking back ends at nodes that were met before.
        for tensor in tensors_in(result):
            source = None if attended else (self._place, self._key(tensor))
            nodes = [tensor.grad_fn]
            while nodes:
                node = nodes.pop()
                if node is None:
                    continue
                metadata: Any = node.metadata  # a dict, which torch annotates as a method
                if _FOLLOWED in metadata:
                    continue
                metadata[_FOLLOWED] = True
                if node.next_functions:  # else it holds a parameter
                    node.register_prehook(partial(self._enter_node, source))
                nodes += [before for before, _ in node.next_functions]

    def _enter_node(self, source: tuple[int, int] | None, _: Any) -> None:
        self._running = source

    def _on_backward(
        self, func: Any, given: list[Tensor], made: list[Tensor], flops: int | None
    ) -> None:
        schema = operator_schema(func)
        # As in the forward: views are left out.
        shared = {storage_key(t.untyped_storage()) for t in given}
        new = any(storage_key(t.untyped_storage()) not in shared for t in made)
        if flops is not None or self._running is None or not (new or schema.is_mutable):
            return
        # The hook of the node that runs has set it: an operator of a backward has no caller.
        self._place, key = self._running
        cut = self._cuts.get(key) or self._region()
        self._move(schema.name.rpartition("::")[2], given, made, cut)

    def _move(self, name: str, given: list[Tensor], made: list[Tensor], cut: Cut) -> None:
        """Count what an operator reads and writes where it runs by itself."""
        if not self._backward or not made or name.startswith(("empty", "new_empty")):
            return
        in_backward = is_in_backward()
        most = max(t.numel() for t in made)
        # A bool as an index: from 1 on for those that only write their first argument.
        read = given[name in _WRITES :]
        if name.startswith("nll_loss"):
            read = []  # an entry of each row
        # A look-up reads the rows that it returns, and not the table.
        limit = most if name in _LOOKUPS else math.inf
        words = sum(_words(t) for t in made) + sum(min(_words(t), limit) for t in read)
        if in_backward:
            of_weights = sum(_words(t) for t in (*made, *read) if self._is_of_weight(t))
            self._part.add("eager_weights", cut, of_weights)
            self._part.add("eager_backward", cut, words - of_weights)
        else:
            self._part.add("eager", cut, words)
        self._part.operators[in_backward] += 1

    def _is_of_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a backward has the size of a weight; sums keep dims of 1."""
        # Leading dims of 1 are those of sums that keep dims.
        dims = tuple(dropwhile((1).__eq__, tensor.shape))
        return dims in self._sizes

    def _is_needed(self, tensor: Tensor) -> bool:
        key = self._key(tensor)
        return self._parameters.get(key, self._needs.get(key, False))

    def _multiply(self, given: list[Tensor], out: Tensor, flops: int, cut: Cut) -> None:
        # Convolutions have their output features in dim 1, products in the last.
        columns = out.shape[1 if len(given) > 1 and given[1].ndim > 3 else -1]
        weights = [t for t in given[:3] if self._key(t) in self._parameters]
        others = [t for t in given[:3] if self._key(t) not in self._parameters]
        divided: Any = {"tensor": "rows", "tokens": "tokens", "whole": "nothing"}[cut]
        makes = self._style(self._stack[-1]).output if self._stack else None
        if makes == "summed":
            divided = "inner"
        # Colwise and vocabulary layers divide their columns.
        elif makes is not None:
            divided, cut = "columns", "tensor"
            self._gather(others[0])
        # Of two activations, the second one needs a gradient as a weight does.
        second = [*weights, *others[1:]][:1]
        self._part.products.append(
            Product(
                rows=out.numel() / columns,
                columns=columns,
                # FLOPs are 2 * rows * columns * inner, whatever the operator.
                inner=flops / (2 * out.numel()),
                divided=divided,
                needs_input=any(self._is_needed(t) for t in others[:1]),
                needs_weight=any(self._is_needed(t) for t in second),
            )
        )
        self._part.kernels += 1
        # Partial sums are whole before they are scattered.
        self._part.add("kept", "whole" if makes == "summed" else cut, out.numel())

    def _gather(self, tensor: Tensor) -> None:
        """Count what a divided layer takes as whole: it is gathered before, and kept so."""
        key = self._key(tensor)
        if self._cuts.get(key, self._region()) != "tokens":
            return
        # It was saved as this rank's tokens; the gathered one is what is kept.
        if key in self._saved:
            self._part.add("saved", "tokens", -_words(tensor))
            self._part.add("saved", "whole", _words(tensor))
        self._cuts[key] = "whole"

    def _stream(
        self, name: str, given: list[Tensor], made: list[Tensor], cut: Cut, needs: bool
    ) -> None:
        self._part.kernels += 1
        if name == "_log_softmax" and (self._place == AFTER or not self._number):
            self._logits.add(self._key(made[0]))
            self._part.add("logits", cut, made[0].numel())
            self.classes = max(made[0].shape[1:], default=1)
            return
        # What reads logits is counted with the loss, see `_LOSS_BYTES` in `part_cost`.
        if any(self._key(t) in self._logits for t in given):
            return  # it reads an entry of each row
        most = max(t.numel() for t in made)
        words = sum(_words(t) for t in made)
        # Of a table, the rows that are looked up.
        words += sum(min(_words(t), most) for t in given)
        self._part.add("traffic", cut, words)
        if needs:
            self._part.add("gradient_traffic", cut, words)

    def attend(
        self, call: Callable[[], Tensor], q: Tensor, k: Tensor, v: Tensor, *, causal: bool
    ) -> Tensor:
        """Record a call of fused attention, whatever it is made of on this device."""
        needs = torch.is_grad_enabled() and any(self._is_needed(t) for t in (q, k, v))
        cut = self._cut(q)
        self.attends = True
        try:
            out = call()
            # [B, N, T, H] that lies in memory as [B, T, N, H].
            if q.ndim == 4 and q.transpose(1, 2).is_contiguous():
                # As fused kernels lay it out: heads are joined again without a copy.
                out = out.transpose(1, 2).contiguous().transpose(1, 2)
        finally:
            self.attends = False
        self.follow(out, attended=True)
        self._cuts[self._key(out)], self._needs[self._key(out)] = cut, needs
        for tensor in (q, k, v, out) if needs else ():
            self._keep(tensor)
        # B N, of all samples; `freeze` divides.
        heads = q.shape[:-2].numel()
        self._part.attentions.append(
            Attention(
                heads=heads,
                kv_heads=k.shape[:-2].numel(),
                queries=q.shape[-2],
                keys=k.shape[-2],
                width=q.shape[-1],
                causal=causal,
                cut=cut,
                needs=needs,
            )
        )
        self._part.kernels += 1
        # Queries, keys and values are products, or made of them.
        self._part.add("kept", cut, out.numel())
        return out

    def lose(self, call: Callable[[], Tensor], logits: ChunkedLogits) -> Tensor:
        """Record a loss that computes its logits in chunks, and their gradients at once."""
        cut, part = self._cut(logits.local), self._part
        self.attends = self.has_chunks = True
        try:
            loss = call()
        finally:
            self.attends = False
        self.follow(loss, attended=True)
        rows, (columns, inner) = logits.numel() / logits.shape[-1], logits.weight.shape
        part.products.append(
            Product(
                rows=rows,
                columns=columns,
                inner=inner,
                divided="columns" if cut == "tensor" else "nothing",
                needs_input=logits.local.requires_grad,
                needs_weight=logits.weight.requires_grad,
            )
        )
        part.add("logits", cut, rows * columns)
        self.classes = columns
        part.kernels += 1
        if self._backward:
            part.add("eager", cut, _PASSES * rows * columns)
            part.operators[0] += _PASSES
        return loss

    def _save(self, tensor: Tensor) -> Tensor:
        """Count what autograd keeps, each storage once."""
        if not self.attends:
            self._keep(tensor)
        return tensor

    def _keep(self, tensor: Tensor) -> None:
        key = self._key(tensor)
        # Once for a storage, as autograd shares it; parameters are counted as weights.
        if key not in self._saved and key not in self._parameters and key not in self._logits:
            self._saved.add(key)
            # A mask is a byte, half a word of 16 bits.
            width = 0.5 if key in self._masks else 1.0
            self._part.add("saved", self._cut(tensor), width * _words(tensor))


class _Functions(TorchFunctionMode):
    """Gives calls of `F.scaled_dot_product_attention` to a recorder, however they are imported, and
    what other functions return.
    """

    def __init__(self, recorder: StepRecorder, original: Callable[..., Tensor]) -> None:
        super().__init__()
        self._recorder, self._original = recorder, original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is self._original and not self._recorder.attends:
            return self.call(*args, **options)
        if func is F.cross_entropy and args and isinstance(args[0], ChunkedLogits):
            return self._recorder.lose(partial(func, *args, **options), args[0])
        result = func(*args, **options)
        if not self._recorder.attends:
            self._recorder.follow(result)
        return result

    def call(self, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
        """Stand for the function itself, which torch's own layers look up in its module."""
        causal = bool(options.get("is_causal", more[2] if len(more) > 2 else False))

        def run() -> Tensor:
            return self._original(query, key, value, *more, **options)

        return self._recorder.attend(run, query, key, value, causal=causal)


def _words(tensor: Tensor) -> float:
    """Return the size of a tensor in numbers of activations, of whose width a flag is a half."""
    # An expanded tensor has fewer numbers in memory than entries.
    count = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
    if tensor.is_floating_point():
        return float(count)
    return count / 2 if tensor.dtype == torch.bool else count * tensor.element_size() / 4
