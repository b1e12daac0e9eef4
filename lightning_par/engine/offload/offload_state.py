"""The states of a host optimizer, and which may follow which."""

from enum import auto, Enum

__all__ = ["NEXT_STATES", "OffloadState"]


class OffloadState(Enum):
    """What one step has in which memory: on the device, or on the host (pinned slots, sums, file).

    In every state the parameters are on the device (with `offload_parameters` on the host), and
    master weights and moments on the host, in memory or in a file. A slot is pinned host memory of
    the size of a parameter, for its gradient on the way down and its new value on the way up.

    - ``IDLE``: Between two steps. No gradient anywhere; the parameters hold every update.
    - ``COLLECTING``: In the backward of a step. Gradients move from the device to slots. Closed
      buckets wait there, as the update needs what only all gradients tell (norm, overflow). An
      update that the step before delayed may still be running; its results are in the other slots.
    - ``COLLECTED``: After that backward. All gradients are in slots (or in sums), none is on the
      device; the factor of the update may still change. The delayed update is published.
    - ``STREAMING``: In the backward of a step whose updates need their own gradient only. Closed
      buckets are updated at once: their slots hold new values, the parameters on the device do not.
    - ``SUBMITTED``: After that backward. Every update of the step is done or under way.
    - ``DELAYED``: Between two steps. The updates of the last one are under way and write to slots;
      the parameters on the device lack them until the next backward ends.
    - ``ACCUMULATING``: In a batch that is not the last of its step. Gradients move to slots, from
      there the worker adds them to sums on the host. With `offload_parameters` they stay on their
      parameters, which are there already, and autograd adds to them.
    - ``PARTIAL``: Between two batches of a step. The sums of the batches so far are on the host;
      slots are free, and the device holds no gradient.
    - ``COMPLETING``: In the backward of the last of several batches. As ``ACCUMULATING``; the sums
      are the gradients of the step when it ends.
    """

    IDLE = auto()
    COLLECTING = auto()
    COLLECTED = auto()
    STREAMING = auto()
    SUBMITTED = auto()
    DELAYED = auto()
    ACCUMULATING = auto()
    PARTIAL = auto()
    COMPLETING = auto()

    @property
    def is_backward(self) -> bool:
        """Whether a backward is under way, in which hooks send every gradient."""
        return self in _BACKWARD

    @property
    def adds(self) -> bool:
        """Whether gradients are added to sums on the host."""
        return self in (OffloadState.ACCUMULATING, OffloadState.COMPLETING)

    @property
    def streams(self) -> bool:
        """Whether a bucket is updated as soon as it is closed."""
        return self in (OffloadState.STREAMING, OffloadState.SUBMITTED)


_S = OffloadState
_BACKWARD = frozenset({_S.COLLECTING, _S.STREAMING, _S.ACCUMULATING, _S.COMPLETING})

NEXT_STATES = {
    _S.IDLE: {_S.COLLECTING, _S.STREAMING, _S.ACCUMULATING},
    _S.COLLECTING: {_S.COLLECTED},
    _S.COLLECTED: {_S.DELAYED},
    _S.STREAMING: {_S.SUBMITTED},
    _S.SUBMITTED: set(),
    _S.DELAYED: {_S.COLLECTING, _S.ACCUMULATING},
    # Back to DELAYED: a first batch without a loss has sent nothing.
    _S.ACCUMULATING: {_S.PARTIAL, _S.DELAYED},
    _S.PARTIAL: {_S.ACCUMULATING, _S.COMPLETING},
    _S.COMPLETING: {_S.COLLECTED},
}
"""What may follow each state. ``IDLE`` may follow all: after an update, a skip or an error."""
