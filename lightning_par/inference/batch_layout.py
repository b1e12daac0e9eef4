"""What a traced step tells about its batch: where tokens and labels are."""

from typing import Any

import torch

from lightning_par.observe.recorder import Operation, Trace, Value
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = ["read_layout", "token_entries"]

_SAME = ("view", "reshape", "flatten", "contiguous", "to", "long", "squeeze", "clone", "detach")


def token_entries(trace: Trace) -> dict[str, int]:
    """Return the entries of integers [B, T] that a table looks up -> T."""
    found = {}
    for operation in trace.operations:
        ids = operation.inputs[0] if operation.inputs else None
        # Ids that were computed in the step, as positions, are no entry of the batch.
        looked_up = operation.name == "embedding" and ids is not None and ids.kind == "input"
        if looked_up and ids is not None and len(ids.shape) == 2 and ids.name:
            found[ids.name] = ids.shape[1]
    return found


def read_layout(trace: Trace) -> BatchLayout:
    """Return the layout of the batch, as far as it is certain.

    The labels are certain if the one cross-entropy of the trace takes a whole entry of the batch,
    or one without its first tokens, and averages over what counts.
    """
    tokens = token_entries(trace)
    dims = dict.fromkeys(tokens, 1)
    losses = [op for op in trace.operations if op.name == "cross_entropy"]
    # Two losses may weigh their labels differently: then nothing is certain.
    if len(losses) != 1 or len(losses[0].inputs) != 2:
        return BatchLayout(sequence_dims=dims)
    (loss,) = losses
    # The loss has to be the step's result: a term beside it may have another rule.
    if loss.kwargs.get("reduction", "mean") != "mean" or loss.outputs != trace.result:
        return BatchLayout(sequence_dims=dims)
    labels, shift = _trace_back(trace, loss.inputs[1])
    if labels is None or not labels.name or labels.dtype != torch.long:
        return BatchLayout(sequence_dims=dims)
    if len(labels.shape) == 2 and labels.shape[1] in tokens.values():
        dims[labels.name] = 1
    return BatchLayout(
        sequence_dims=dims,
        labels=labels.name,
        ignore_index=_ignored(loss),
        label_shift=shift,
    )


def _ignored(loss: Operation) -> int:
    value: Any = loss.kwargs.get("ignore_index", -100)
    return int(value)


def _trace_back(trace: Trace, value: Value) -> tuple[Value | None, int]:
    """Return the batch entry that a target is, and how many of its first tokens are left out."""
    shift = 0
    # Back to the entry of the batch, through what neither drops nor repeats entries.
    while value.maker is not None:
        operation = trace.operations[value.maker]
        if len(operation.inputs) != 1 or len(operation.outputs) != 1:
            return None, 0
        if operation.name == "__getitem__":
            left = _left_out(operation)
            if left is None:
                return None, 0
            shift += left
        elif operation.name not in _SAME or not _keeps_count(operation):
            return None, 0
        value = operation.inputs[0]
    return (value, shift) if value.kind == "input" else (None, 0)


def _keeps_count(operation: Operation) -> bool:
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    return torch.Size(before).numel() == torch.Size(after).numel()


def _left_out(operation: Operation) -> int | None:
    """Return n of ``x[..., n:]`` on [B, T]."""
    index = operation.args[1] if len(operation.args) > 1 else None
    if not isinstance(index, tuple) or len(index) != 2 or len(operation.inputs[0].shape) != 2:
        return None
    rows, columns = index
    # Rows have to stay: a cut of samples is no shift of labels.
    if not (rows is Ellipsis or rows == slice(None)) or not isinstance(columns, slice):
        return None
    start = columns.start
    ends = columns.stop is None and columns.step is None
    return start if ends and isinstance(start, int) and start >= 0 else None
