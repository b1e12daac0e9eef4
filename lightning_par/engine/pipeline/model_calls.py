"""Calls of the model through the stages of a pipeline, each with its result on every stage.

Hooks between steps, and steps that generate text, run on every rank alike, from the beginning to
the end. Only a call of the model, or of a part of it that holds blocks, passes through the stages:
forward only, as one micro-batch.

Note [Caches of generation]: a cache of keys and values, as those of transformers, is filled by the
attention of each block for its own layer, and code outside of the blocks asks it for its length.
Every rank has the cache that its own code has made, and no cache is sent. What the blocks of a
stage have added tells how many tokens the layers of other stages have got: they take as many, with
one number in the place of a key, by their own update. So lengths, windows and masks are those of
one process, and what the code does to the cache between two calls, such as the order of beams,
happens on every stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.pipeline.executor import PipelineExecutor
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.schedules import forward_only
from lightning_par.engine.pipeline.stage import StageExit
from lightning_par.engine.tensor_tree import children, TreeBroadcast
from lightning_par.errors import PipelineError
from lightning_par.upstream.functions import replaced

__all__ = ["ModelCalls"]


class ModelCalls:
    """Passes calls of the model through the stages.

    Args:
        executor: Runs the stages of this rank.
        rank_of_stage: The pipeline rank that holds each stage.
        results: Gives every stage the result of the last one.

    Attributes:
        in_step: Whether the user's step that runs passes its calls of the model one by one.
    """

    def __init__(
        self, executor: PipelineExecutor, rank_of_stage: Sequence[int], results: TreeBroadcast
    ) -> None:
        self._executor, self._results = executor, results
        self._schedule = forward_only(rank_of_stage, 1)
        self._count, self.in_step = 0, False

    def one_by_one(self, is_on: bool = True) -> AbstractContextManager[None]:
        """Surrounds a step all of which runs on every stage, or what is inside of one call."""
        return replaced(self, "in_step", is_on)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_part: bool = False,
    ) -> Any:
        """Call the model, or a part of it that holds blocks; every stage gets the result.

        Args:
            forward: The call.
            args: Its arguments, alike on every stage.
            kwargs: Likewise.
            is_part: Whether it may call some of the blocks only, as the encoder of a model.

        Raises:
            PipelineError: There is a cache whose layers of other stages tell no length.

        **Communicates**: as an evaluation step, and the result, to all stages.
        """
        stages, caches = self._executor.stages, _Caches((args, kwargs))
        if len(stages) > 1 and caches.held:
            raise PipelineError(
                "LP407",
                "the model is called with a cache of keys and values, but each rank holds several "
                "pipeline stages, and a stage would read what another stage has just added to the "
                "cache. Pass use_cache=False, or use a schedule with one stage on each rank.",
            )
        # A message of its own: what a stage hands on may have any shape.
        # A new signature for each call, so that each has a header of its own, and none is kept.
        self._count += 1
        signature = "call", self._count

        def call(_: int) -> Any:
            try:
                return forward(*args, **kwargs)
            except StageExit as end:
                caches.meet(end.args)
                raise

        for stage in stages:
            stage.may_skip = is_part
        try:
            # Inside of one call the blocks run as usual, and do not pass each other's calls on
            # again.
            with torch.no_grad(), self.one_by_one(False):
                run = self._executor.run(self._schedule, call, [signature], None)
        finally:
            for stage in stages:
                stage.may_skip = False
        for link in self._executor.links.values():
            if isinstance(link.activations, Channel):
                link.activations.forget(signature)
        # The last stage alone has it; its caches may be those that the model has made.
        own = run.results.get(0)
        caches.meet(own)
        result = self._results.broadcast(own, caches.held)
        if len(stages) == 1:
            caches.even_out()
        return result


def _caches_in(value: Any) -> Iterator[Any]:
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        yield value
        return
    for _, held in children(value) or ():
        yield from _caches_in(held)


class _Caches:
    """The caches of keys and values of one call.

    Args:
        given: Its arguments.

    Attributes:
        held: The caches, in an order that all stages share: those of the arguments, then those
            that the model has made, as the first block of the next stage was given them.
    """

    def __init__(self, given: Any) -> None:
        self.held: list[Any] = []
        self._before: dict[int, list[int]] = {}
        self.meet(given)
        self._before = {id(cache): _lengths(cache) for cache in self.held}

    def meet(self, values: Any) -> None:
        """Take note of the caches in arguments, or in a result."""
        # By identity: the same cache may be in the arguments and in the result.
        known = {id(cache): cache for cache in [*self.held, *_caches_in(values)]}
        self.held = list(known.values())

    def even_out(self) -> None:
        """Let the layers of other stages take as many tokens as those of this rank have got."""
        for cache in self.held:
            now, before = _lengths(cache), self._before.get(id(cache), [])
            before = before + [0] * (len(now) - len(before))
            # Layers of this stage's own blocks have taken tokens; those of others are behind by
            # as many.
            grown = {i: a - b for i, (a, b) in enumerate(zip(now, before, strict=True)) if a > b}
            if grown:
                first = next(iter(grown))
                _take(
                    cache, grown[first], _layers(cache)[first].keys, {*range(len(now))} - {*grown}
                )


def _layers(cache: Any) -> Any:
    """Return the layers of a cache; of one of encoders and decoders, those of self-attention."""
    return getattr(cache, "self_attention_cache", cache).layers


def _lengths(cache: Any) -> list[int]:
    try:
        return [int(layer.get_seq_length()) for layer in _layers(cache)]
    except (AttributeError, NotImplementedError):
        raise PipelineError(
            "LP407",
            f"the model is called with a {type(cache).__name__}, but get_seq_length() fails for "
            "some of its layers. A pipeline stage needs this number of tokens for the layers of "
            "other stages. Pass use_cache=False, or use pipeline_parallel_size=1.",
        ) from None


def _take(cache: Any, tokens: int, like: Tensor, layers: set[int]) -> None:
    """Let layers take tokens without keys and values; see Note [Caches of generation]."""
    # [B, 1 head, tokens, 1]: `update` appends along dim 2, whatever the sizes of the others.
    empty = like.new_zeros((len(like), 1, tokens, 1))
    for layer in layers:
        getattr(cache, "self_attention_cache", cache).update(empty, empty, layer)
