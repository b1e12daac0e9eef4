"""The random state of the user's steps: what one process would have, or a seed for every step.

A step that draws nothing but dropout is seeded anew in every step and micro-batch, so that the
ranks of a replica draw the same. One that draws other numbers, such as the noise of a diffusion
model, runs from the random state of the run, as on one process; see Note [Whole draws] in
`random_draws.py`. Which of them it is shows in the first look at the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_par.engine.batch import batch_entry, has_entry, sequence_entries, split_rows
from lightning_par.engine.collectives import split_sizes
from lightning_par.engine.pipeline.refusals import PassedOverError, SecondCallError
from lightning_par.engine.rng import (
    collect_random_states,
    fork_all_rng,
    restore_random_states,
    seed_all_generators,
    seed_of,
    states_alike,
)
from lightning_par.engine.tensor_tree import broadcast_object
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.data.batch_copies import BATCH_HOOKS, has_hook
from lightning_par.strategies.data.replica_batches import Share
from lightning_par.strategies.step.random_draws import Rows, Tokens, WholeDraws

__all__ = ["HookDraws", "StepRandom", "shared_tokens"]

_UNKNOWN = Share()


class HookDraws:
    """Warns, once, where hooks for batches draw random numbers on each of several replicas.

    Args:
        module: The user's LightningModule; its hooks, or those of its data module, are watched.
        replicas: Their number.
        device: Device of this rank.
    """

    def __init__(self, module: pl.LightningModule, replicas: int, device: torch.device) -> None:
        hooks = [name for name in BATCH_HOOKS if replicas > 1 and has_hook(module, name)]
        self._hooks, self._replicas, self._device = " or ".join(hooks), replicas, device

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds the hooks on one batch."""
        if not self._hooks:
            yield
            return
        before = collect_random_states(self._device)
        yield
        if not states_alike(before, collect_random_states(self._device)):
            rank_zero_warn(
                f"{self._hooks} draws random numbers. Each of {self._replicas} replicas draws them "
                "for its own samples, from generators in the same state, so the numbers of the "
                "replicas repeat. A run on one process draws different numbers for the whole "
                "batch. Draw in training_step, where each replica gets the numbers of its own "
                "samples, or in the data set."
            )
            self._hooks = ""


class StepRandom:
    """Puts the generators into the right state for the user's steps.

    Args:
        mesh: Its replicas see other samples; the ranks of one draw the same.
        device: Device of this rank.
        seed: Gives the seed of all steps, the same on every rank.
        name: ``"training_step"`` or another step.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        device: torch.device,
        seed: Callable[[], int],
        name: str,
    ) -> None:
        sizes = mesh.sizes
        self._device, self._seed, self._name = device, seed, name
        # Ranks of one replica have to draw alike. A replica of one rank has nobody to agree with,
        # and keeps the generators of the run.
        self._seeds = sizes.world_size > sizes.data
        self._replicas, self._data_rank = sizes.data, mesh.data_rank
        self._token_ranks, self._token_rank = sizes.tensor, mesh.place["tp"]
        self._draws = WholeDraws(device, name)
        self._draws_whole = self._has_drawn = self._is_silent = False
        self._rows: list[Rows] = []
        self._begin: dict[str, Any] | None = None  # state at the beginning of the step
        self._end: dict[str, Any] | None = None
        self._has_begun = False  # whether a micro-batch of the step has run here
        self._looked: list[tuple[bool, dict[str, Any]]] | None = None

    @contextmanager
    def step(
        self,
        samples: int = 1,
        microbatches: int = 1,
        tokens: int | None = None,
        share: Share = _UNKNOWN,
    ) -> Iterator[None]:
        """Surrounds all micro-batches of a step.

        Args:
            samples: Of the batch of this replica.
            microbatches: Into how many it is cut.
            tokens: T, if this rank may see T/tp of them.
            share: What the batch of this replica is of the global one.

        **Communicates**: the random state of rank 0, if the step draws more than dropout; after one
        of evaluation, two numbers, and the state of the rank that drew most, if some drew less.
        """
        if not self._draws_whole:
            # Seeds of a step must not show outside: the user's own draws between steps go on.
            with fork_all_rng(self._device) if self._seeds else nullcontext():
                yield
            return
        self._draws.tokens = self._own_tokens(tokens)
        ranks = 1 if share.is_whole else self._replicas
        total = share.total or samples * ranks
        first = 0 if share.is_whole or share.fills else self._data_rank
        # Samples are dealt out like cards.
        self._rows = [
            Rows(start * ranks + first, length, total, ranks)
            for start, length in split_rows(samples, microbatches)
        ]
        assert dist.group.WORLD is not None
        # Rank 0's state, for every rank: hooks and loaders may have drawn unequally on them.
        states = collect_random_states(self._device)
        self._begin, self._end = broadcast_object(states, 0, dist.group.WORLD), None
        self._has_begun = False
        try:
            yield
            if self._replicas > 1 and self._name != "training_step":
                self._catch_up()
        finally:
            self._begin = None

    def _catch_up(self) -> None:
        """Continue from the state of the rank that drew most. Texts of replicas end at other
        lengths, and one process draws until the longest has ended.
        """
        # One MAX finds the largest count together with a rank that has it, and, by its negative,
        # the smallest count.
        rank, world, count = dist.get_rank(), dist.get_world_size(), self._draws.count
        most = torch.tensor([count * world + rank, -count], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        last, fewest = most.tolist()
        # Reduced, so that all ranks enter the broadcast or none.
        if last // world > -fewest:
            assert dist.group.WORLD is not None
            states = collect_random_states(self._device)
            states = broadcast_object(states, last % world, dist.group.WORLD)
            restore_random_states(states, self._device)

    def _own_tokens(self, tokens: int | None) -> Tokens | None:
        if tokens is None or self._token_ranks == 1:
            return None
        sizes = split_sizes(tokens, self._token_ranks)
        return Tokens(sum(sizes[: self._token_rank]), sizes[self._token_rank], tokens)

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        """Continue from the state of the last pipeline stage, inside of `step`.

        Args:
            broadcast: Returns the value of the last stage.
        """
        # Stages before the last leave the user's step at the end of their blocks, and have drawn
        # less than one process.
        if self._begin is not None:
            restore_random_states(broadcast(self._end), self._device)

    @contextmanager
    def user_step(self, key: tuple[Any, ...], microbatch: int) -> Iterator[None]:
        """Surrounds the user's step for one micro-batch.

        Args:
            key: Name of the step and what else makes it differ from others.
            microbatch: Number of the micro-batch.
        """
        if self._looked is not None:
            with self._look_at(microbatch):
                yield
            return
        if self._begin is not None:
            # Every micro-batch begins where the step begins: each draws for all samples, and
            # keeps its own.
            restore_random_states(self._begin, self._device)
            # A generator of the user's was advanced by the first micro-batch, and is put back.
            rewinds, self._has_begun = self._has_begun, True
            with self._draws.forward(self._rows[microbatch], rewinds=rewinds):
                yield
            # Only the last stage gets here: others leave the step by an exception.
            self._end = collect_random_states(self._device)
            return
        if self._seeds:
            seed = seed_of(self._seed(), *key, microbatch, self._data_rank)
            # By data rank, so that replicas have other dropout masks, and by micro-batch.
            seed_all_generators(seed, self._device)
        before = torch.get_rng_state() if self._is_silent else None
        yield
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self._complain()

    def _complain(self) -> None:
        """Refuse numbers that nobody has learned to share; warn once if nothing trains on them."""
        text = (
            f"{self._name} drew no random numbers in the first step, but draws some now. How "
            "random numbers are divided over the ranks is found in the first step, so these "
            "numbers {} equal to those of a run on one process. Let the step draw random numbers "
            "from the first step on."
        )
        if self._name == "training_step":
            raise ConfigurationError("LP311", text.format("would not be"))
        self._is_silent = False
        rank_zero_warn(text.format("are not"))

    def replay(self, microbatch: int = 0) -> AbstractContextManager[None]:
        """Surrounds a backward, which may recompute blocks that drew random numbers."""
        if not self._draws_whole or not self._rows:
            return nullcontext()
        return self._draws.replay(self._rows[microbatch])

    @contextmanager
    def look(
        self, sizes: Sequence[int], batch_size: int, tokens: int | None = None
    ) -> Iterator[None]:
        """Surrounds the first look at a step, which runs on some samples and on parts of them.

        Args:
            sizes: Numbers of samples, those of the whole first.
            batch_size: Number of samples of the batch; 0 where the step may fail in the look alone.
            tokens: As in `step`.
        """
        self._draws.tokens = self._own_tokens(tokens)
        # The parts follow each other in the whole: [whole, first part, second part, ...].
        starts = [0, *(sum(sizes[1:i]) for i in range(1, len(sizes)))]
        self._rows = [Rows(at, n, sizes[0]) for at, n in zip(starts, sizes, strict=True)]
        self._looked, self._batch_size = [], batch_size
        self._draws.begin_look()
        try:
            with fork_all_rng(self._device):
                yield
        finally:
            self._looked = None
            self._draws.settle()  # also after a look that came to no end

    @property
    def draws(self) -> bool:
        """Whether the step drew any numbers in a look that was judged."""
        return not self._is_silent

    @property
    def draws_more(self) -> bool:
        """Whether the step draws other numbers than those of dropout."""
        return self._draws_whole

    def refuse(self, error: LightningParError) -> bool:
        """Note what `judge` then raises on every rank, also on those where the step did not fail.

        Args:
            error: What is wrong, and what to do.

        Returns:
            False, and nothing is noted, outside of `look`.
        """
        if self._looked is None:
            return False
        self._draws.refusal = self._draws.refusal or error
        return True

    def refusal(self, error: LightningParError | None = None) -> LightningParError | None:
        """Return what was noted, and `judge` will raise.

        Args:
            error: What has stopped a stage, and is noted if it says that the step has ended.
        """
        if isinstance(error, PassedOverError):
            self.refuse(error)
        return self._draws.refusal

    @contextmanager
    def _look_at(self, part: int) -> Iterator[None]:
        assert self._looked is not None
        # The same seed for whole and parts: then equal states at their ends mean equal draws.
        seed_all_generators(seed_of(self._seed(), "first look"), self._device)
        ended = False
        try:
            with self._draws.forward(self._rows[part]):
                yield
            ended = True
        except LightningParError as error:
            if error.code != "LP321" and not isinstance(error, SecondCallError):
                raise
            self.refuse(error)  # other stages have passed on; `judge` raises it on all of them
        except Exception as error:
            size, of = self._rows[part].length, self._batch_size
            if size == of:  # it fails on one process, too
                raise
            text = (
                f"{self._name} fails when it gets {size} of the {of} samples of a batch, as it "
                f"does with micro-batches or replicas: {type(error).__name__}: {error}"
            )
            if not of:
                text = f"{type(error).__name__}: {error}"
            refusal = ConfigurationError("LP303", text)
            # Set here, as `judge` raises it far from this handler.
            refusal.__cause__ = error
            self.refuse(refusal)
        finally:
            # Also of a run that failed: its draws so far are known.
            self._draws.learn()
            self._draws.rewind()
            self._looked.append((ended, collect_random_states(self._device)))

    def judge(self, *, divides: bool) -> bool:
        """Decide, at the end of `look`, what later steps need.

        Args:
            divides: Whether the batch is cut, or divided among replicas.

        Returns:
            Whether the step drew random numbers that cannot be cut, the same on every rank.

        Raises:
            ConfigurationError: It drew as many of NumPy's or Python's as there are samples, or
                numbers that cannot be shared.

        **Communicates**: one all-reduce of five numbers over all ranks.
        """
        assert self._looked is not None
        seed_all_generators(seed_of(self._seed(), "first look"), self._device)
        begin = collect_random_states(self._device)
        # A stage that was left by an exception has drawn less than one that ran to its end: only
        # runs that ended alike are compared.
        states = [state for _, state in self._looked]
        pairs = [(a, b) for ended, a in self._looked for other, b in self._looked if ended == other]
        flags = [
            self._draws.is_opaque or any(_differ(a, b, "torch", "cuda") for a, b in pairs),
            any(_differ(a, b, "python", "numpy") for a, b in pairs),
            self._draws.drew or any(_differ(begin, s, "python", "numpy") for s in states),
            any(_differ(begin, s, "torch", "cuda") for s in states),
            self._draws.refusal is not None,
        ]
        found = torch.tensor([float(flag) for flag in flags], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        unknown, depends, draws, changes, refused = map(bool, found.tolist())
        # A maximum over all ranks, so that all of them gather the reasons.
        if refused:
            errors: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, self._draws.refusal)
            raise self._draws.refusal or next(filter(None, errors))  # with the traceback here
        if depends and divides:
            raise ConfigurationError(
                "LP311",
                f"{self._name} draws a random number with NumPy or Python for each sample. The "
                "numbers of a batch cannot be divided over micro-batches and replicas. Draw the "
                "numbers with torch (torch.rand(batch_size)) or in the data set, or use "
                "num_microbatches=1 and data_parallel_size=1.",
            )
        # A step may draw in some of its forms only.
        self._draws_whole |= draws
        self._has_drawn |= draws or changes
        self._is_silent = not self._has_drawn
        return bool(unknown)


def _differ(one: dict[str, Any], other: dict[str, Any], *names: str) -> bool:
    return not states_alike({name: one[name] for name in names if name in one}, other)


def shared_tokens(batch: Any, layout: BatchLayout) -> int | None:
    """Return T of a batch, of which every tensor-parallel rank has its own tokens.

    Args:
        batch: That of this replica.
        layout: Where its sequence dims are.
    """
    for path, dim in sequence_entries(batch, layout).items():
        entry = batch_entry(batch, path) if has_entry(batch, path) else None
        # Activations have their tokens in dim 1, as draws for them have.
        if dim == 1 and isinstance(entry, Tensor) and entry.ndim > 1:
            return int(entry.shape[1])
    return None
