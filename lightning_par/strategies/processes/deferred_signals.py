"""Signals that save or end a run, answered between two batches, by every rank after the same one.

Note [Torn checkpoints]: Python calls the handler of a signal between any two of its instructions,
hence also in the middle of an optimizer step, and on every rank elsewhere. Lightning's handlers
save, or broadcast, right there. That takes whole weights and all ranks at one place.

Note [Agreement on a batch]: a rank that gets a signal says so in the store of the process group,
where a thread of every rank looks now and then. The thread names a batch that its main thread will
not pass before all ranks have named theirs. After the last one of these batches they call their
handlers. This works because every rank has as many batches as the others, in validation too. Steps
pay nothing for it.
"""

import atexit
import inspect
import json
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_par.upstream.distributed import default_store
from lightning_par.upstream.lightning import callbacks_of, is_accumulating

__all__ = ["DeferredSignals"]

Place: TypeAlias = tuple[int, int]
"""Batches trained on, and batches evaluated since; places are in the order of time."""

_PERIOD = 0.2
"""Seconds between two looks at the store."""
_PATIENCE = 30.0
"""Seconds in which all ranks have to name a batch; one whose run has ended does not."""
_LEAVE = 3.0
"""Seconds in which the thread ends; it does so by itself after its last look at the store."""
_OVER = "over"
"""Verdict: somebody named none, and nobody answers the signal."""
_logger = logging.getLogger(__name__)


class DeferredSignals(pl.Callback):
    """Calls Lightning's handlers of signals between two batches; see Note [Torn checkpoints].

    It is among the callbacks of the Trainer only once a signal has come. Handlers that Lightning
    has not registered are called at once, as before.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._waiting: list[int] = []
        self._ending: int | None = None
        """SIGTERM once answered; each process that ends the run may send one."""
        self._agreement: _Agreement | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Defer signals from now on; a loop starts, perhaps inside of another one.

        Args:
            trainer: Runs on every rank; Lightning has registered its handlers.
        """
        # A validation inside of training begins a loop of its own: the first one stays in charge.
        if self._trainer is trainer or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may have handlers; Lightning has registered none
        # Of a run that has ended without its teardown.
        self.close()
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            # Lightning registers an object of its own (`_HandlersCompose`); a function is the
            # user's.
            if callable(handler) and type(handler).__module__.startswith("lightning."):
                self._handlers[number] = handler
                signal.signal(number, self._receive)
        self._trainer = trainer
        if self._handlers and trainer.world_size > 1:
            self._agreement = _Agreement(self._join)
            # A Trainer whose callback raises in `on_exception` skips its teardown.
            atexit.register(self.close)

    def end(self) -> None:
        """Call the handlers of signals that came during the last batch of the run."""
        # The end of a validation inside of a fit is none of the run.
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            return
        self._answer(None)
        self.close()

    def close(self) -> None:
        """Give signals their handlers back; what still waits for the end of a batch is dropped."""
        for number, handler in self._handlers.items():
            # Only where nobody has registered another one since.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        if self._agreement is not None:
            self._agreement.close()
            atexit.unregister(self.close)
        if self._trainer is not None and self in callbacks_of(self._trainer):
            callbacks_of(self._trainer).remove(self)
        self._handlers, self._waiting = {}, []
        self._trainer = self._agreement = self._ending = None

    def _receive(self, number: int, frame: Any) -> None:
        """Put a signal off until the batch has ended; called as its handler."""
        # Once for each: a scheduler sends a signal again until the process ends.
        if number in self._waiting or number == self._ending:
            return
        _logger.info("signal %d will be handled when this batch has ended.", number)
        self._waiting.append(number)
        if self._agreement is None:
            self._join()
        else:
            self._agreement.ask(number)

    def _join(self) -> Place:
        """Join the callbacks, and return a place behind the next end of a batch."""
        assert self._trainer is not None
        # Only now: until a signal comes a batch has no callback more.
        if self not in callbacks_of(self._trainer):
            callbacks_of(self._trainer).append(self)
        return _next_place(self._trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._answer((_training(trainer).processed, 0))

    def _on_evaluation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._answer((_training(trainer).processed, _evaluation(trainer).processed))

    on_validation_batch_end: Any = _on_evaluation_batch_end
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _answer(self, place: Place | None) -> None:
        """Call the handlers of what all ranks answer at a place; None: at the end of the run."""
        trainer = self._trainer
        assert trainer is not None
        is_between = place is not None and trainer.state.fn == TrainerFn.FITTING
        # All ranks are at the same batch, so all of them put it off alike.
        if is_between and not trainer.sanity_checking and is_accumulating(trainer):
            return  # a checkpoint holds no gradients
        # Alone there is nobody to agree with: at once.
        due = list(self._waiting) if self._agreement is None else self._agreement.due_at(place)
        for number in due:
            if number in self._waiting:
                self._waiting.remove(number)  # in place: a signal may come meanwhile
            # Noted before its handler, which raises.
            if number == signal.SIGTERM:
                self._ending = number
            handler = self._handlers.get(number)
            if handler is not None:
                handler(number, inspect.currentframe())


class _Agreement:
    """Finds the batch after which all ranks answer a signal; see Note [Agreement on a batch].

    Every rank has to make one at the same place.

    Args:
        join: Called by the thread of every rank once one of them asks; returns a place at or before
            which this rank calls `due_at`.
    """

    def __init__(self, join: Callable[[], Place]) -> None:
        self._join = join
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = default_store()
        # The run is part of every key: a process group may see several of them.
        # Counted per rank: every rank makes one at the same place, so the numbers agree.
        run = self._store.add(f"lightning_par/signals/runs/{self._rank}", 1)
        self._prefix = f"lightning_par/signals/{run}"
        self._asked: list[int] = []
        self._count = 0
        """Signals that have been answered."""
        self._number: int | None = None
        """The signal that is being agreed on."""
        self._mine: Place = (0, 0)
        self._verdict: str | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="signal-agreement", daemon=True)
        self._thread.start()

    def _key(self, what: str, *of: int) -> str:
        return "/".join([self._prefix, str(self._count), what, *map(str, of)])

    def ask(self, number: int) -> None:
        """Let all ranks agree on an answer to a signal; called by its handler, hence no lock."""
        self._asked.append(number)

    def due_at(self, place: Place | None) -> list[int]:
        """Return the signals that all ranks answer now.

        Args:
            place: Where this rank is; None: behind its last batch.
        """
        with self._changed:
            # Before the place that this rank has named it need not wait: the others cannot have
            # passed theirs.
            if self._number is None or (place is not None and place < self._mine):
                return []
            # At this place the answer is awaited: passing it would break the promise.
            self._changed.wait_for(lambda: self._verdict is not None or self._closing.is_set())
            verdict, number = self._verdict or _OVER, self._number
            # Another rank is ahead: train on up to its place.
            if verdict != _OVER and place is not None and place < tuple(json.loads(verdict)):
                return []
            self._verdict = None
            while number in self._asked:
                self._asked.remove(number)  # in place: a handler may append meanwhile
            self._count += 1
            self._number = None  # last: the thread, which takes no lock to see it, may go on
            self._changed.notify_all()
        if verdict == _OVER:
            _logger.warning("signal %d is not handled, since the run has ended.", number)
            return []
        return [number]

    def close(self) -> None:
        """Stop listening."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(_LEAVE)  # then it may wait for a store that no network leads to

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and the run with it
            while not self._closing.wait(_PERIOD):
                is_free = self._number is None
                # One look at one key: this is all that a run without a signal costs.
                if is_free and (self._asked or self._store.check([self._key("signal")])):
                    self._agree()

    def _agree(self) -> None:
        if self._asked:
            asked = str(self._asked[0])
            # If two ranks ask at once, the first decides which signal it is; the other's stays
            # asked.
            number = int(self._store.compare_set(self._key("signal"), "", asked))
        else:
            number = int(self._store.get(self._key("signal")))
        with self._changed:
            if self._closing.is_set():
                return
            # Under the lock: from here on the main thread stops at that place.
            self._number, self._mine = number, self._join()
        # Only after that: whoever reads the place may rely on it.
        self._store.set(self._key("answer", self._rank), json.dumps(self._mine))
        keys = [self._key("answer", rank) for rank in range(self._size)]
        looks = 0
        while not self._store.check(keys) and looks * _PERIOD < _PATIENCE:
            looks += 1
            if self._closing.wait(_PERIOD):
                return
        found = _OVER
        if self._store.check(keys):
            # The latest place of all: no rank has passed it, and every rank gets there.
            found = json.dumps(max(json.loads(self._store.get(key)) for key in keys))
        # The first to know or to give up decides for all.
        verdict = self._store.compare_set(self._key("verdict"), "", found)
        with self._changed:
            self._verdict = verdict.decode()
            self._changed.notify_all()


def _training(trainer: pl.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress.total


def _evaluation(trainer: pl.Trainer) -> Any:
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn].batch_progress.total


def _next_place(trainer: pl.Trainer) -> Place:
    """Return a place that lies behind every end of a batch that `trainer` has passed.

    Called beside the main thread, which trains on meanwhile: looks until it sees the same twice.
    """
    seen: Any = None
    while True:
        # The counters of the loops, which the main thread changes one after another.
        training, evaluation = _training(trainer), _evaluation(trainer)
        now = (trainer.training, training.ready, training.processed, evaluation.ready)
        if now == seen:
            break
        seen = now
    is_training, ready, processed, evaluated = seen
    # The next end of a batch of this evaluation.
    if not is_training:
        return ready, evaluated + 1
    # Inside of a batch its own end may be past the callbacks already: the one behind it is sure.
    return (ready, 1) if processed < ready else (ready + 1, 0)
