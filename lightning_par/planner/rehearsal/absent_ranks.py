"""A world of which one rank is there: what it would hear from the others, it hears from itself.

Collectives move nothing: a tensor that is real keeps this rank's values. Objects that others would
send are this rank's own. Of a pipeline, the earlier stages answer with the shapes of what their
blocks give, which are run on the meta device, and the last one with losses of 1.
"""

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import nn, Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_par import mesh
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.stage import Message, MicroBatchState, Stage, StageExit
from lightning_par.engine.pipeline.stubs import EarlierBlock, shape_of_block
from lightning_par.engine.tensor.sequence_parallel import SEQUENCE_DIM
from lightning_par.engine.tensor_tree import BatchBroadcast, on_first_tensor, pack, PackedTree
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.processes import mesh_processes
from lightning_par.strategies.step import first_look
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import tree_map

__all__ = ["LoneEnvironment", "answered_alone", "lone_world"]


class LoneEnvironment(ClusterEnvironment):
    """Environment of one rank of a world, whose other ranks nobody starts.

    Args:
        rank: Global rank.
        num_nodes: Number of nodes.
        num_local: Ranks of a node.
    """

    def __init__(self, rank: int, num_nodes: int, num_local: int) -> None:
        self._rank, self._num_nodes, self._num_local = rank, num_nodes, num_local

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._num_nodes * self._num_local

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the size is given."""

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is given."""

    @override
    def local_rank(self) -> int:
        return self._rank % self._num_local

    @override
    def node_rank(self) -> int:
        return self._rank // self._num_local


@contextmanager
def lone_world(rank: int, world_size: int) -> Iterator[None]:
    """Make a default process group that moves nothing, for one rank of a world.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
    """
    # Without a store torch makes one that holds nothing, and registers the backend on the way.
    dist.init_process_group("fake", rank=0, world_size=1)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def answered_alone(strategy: MeshStrategy) -> Iterator[None]:
    """Inside, a run of `strategy` does not wait for what other ranks would say.

    Args:
        strategy: Of a Trainer in a `lone_world`.
    """
    stages = _AbsentStages(strategy)
    send_objects, send_batch = dist.broadcast_object_list, BatchBroadcast.broadcast

    def broadcast_object_list(
        objects: list[Any], src: int = 0, group: Any = None, **options: Any
    ) -> None:
        if src == dist.get_rank():
            send_objects(objects, src, group, **options)
            return
        # The calls that torch makes, for this rank's own objects.
        sizes = torch.tensor([len(pickle.dumps(each)) for each in objects])
        dist.broadcast(sizes, src, group=group)
        dist.broadcast(torch.empty(int(sizes.sum()), dtype=torch.uint8), src, group=group)

    def broadcast(batches: BatchBroadcast, batch: Any) -> Any:
        with replaced(batches, "_is_source", True):
            return send_batch(batches, batch)

    with ExitStack() as opened:
        for owner, name, value in (
            (dist, "broadcast_object_list", broadcast_object_list),
            (BatchBroadcast, "broadcast", broadcast),
            (Channel, "receive_header", stages.receive_header),
            (PipelineExecutor, "run", stages.run),
            # Calls that move nothing end at once.
            (mesh, "set_timeout", lambda *_: None),
            # Nobody watches ranks that are not there.
            (mesh_processes, "open_status_file", lambda *_: None),
            # Losses without values tell nothing of the rule by which they are made.
            (first_look, "rule_error", lambda *_: math.nan),
        ):
            opened.enter_context(replaced(owner, name, value))
        yield


class _AbsentStages:
    """Answers for the other stages of a pipeline.

    Args:
        strategy: Knows the module, once it has been set up.
    """

    def __init__(self, strategy: MeshStrategy) -> None:
        self._strategy = strategy
        self._headers: dict[Any, PackedTree] = {}
        self._run, self._receive = PipelineExecutor.run, Channel.receive_header

    @property
    def run(self) -> Callable[..., PipelineRun]:
        """Stands for `PipelineExecutor.run`."""

        def run(
            executor: PipelineExecutor,
            schedule: Any,
            step: Callable[[int], Any],
            signatures: Any,
            scaled_loss_of: Any,
            *more: Any,
        ) -> PipelineRun:
            for stage in executor.stages:
                link = None if stage.is_first else executor.links[stage.index - 1].activations
                for index, signature in enumerate(signatures):
                    if isinstance(link, Channel) and not link.knows(signature):
                        self._headers[link, signature] = self._header(stage, partial(step, index))
            done = self._run(executor, schedule, step, signatures, scaled_loss_of, *more)
            if not any(stage.is_last for stage in executor.stages):
                for index in range(len(signatures)):
                    done.results[index] = torch.ones(())
                    if scaled_loss_of is not None:
                        scaled_loss_of(index, done.results[index])
            return done

        return run

    @property
    def receive_header(self) -> Callable[[Channel, Any], PackedTree]:
        """Stands for `Channel.receive_header`."""

        def receive_header(channel: Channel, signature: Any) -> PackedTree:
            text = pickle.dumps(self._headers[channel, signature])
            arriving = iter(
                [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
            )
            receive = dist.recv

            def recv(tensor: Tensor, *args: Any, **options: Any) -> Any:
                source = receive(tensor, *args, **options)
                tensor.copy_(next(arriving))
                return source

            with replaced(dist, "recv", recv):
                return self._receive(channel, signature)

        return receive_header

    def _header(self, stage: Stage, step: Callable[[], Any]) -> PackedTree:
        """Return the header of what the stage before `stage` sends for a micro-batch."""
        found = _run_earlier_blocks(self._strategy.parallel_model.module, stage, step)
        received: Message = {}
        for index in range(stage.index):
            earlier = Stage(index, stage.bounds, stage.carried, stage.kept)
            earlier.current = MicroBatchState(received=received)
            for number in range(earlier.first_block, earlier.end_block):
                block, output = found[number]
                earlier.record(number, block, None, on_first_tensor(self._own_tokens, output))
            received = earlier.outgoing(earlier.current)
        header, _ = pack(tree_map(_on_device, received))
        return header

    def _own_tokens(self, hidden: Tensor) -> Tensor:
        """Return hidden states as they are between blocks: sharded along T, or whole."""
        options, model = self._strategy.options, self._strategy.parallel_model
        sharded = options.sequence_parallel and model.resolved.plan.sequence_region != "none"
        degree = self._strategy.sizes.tensor if sharded else 1
        return hidden if degree == 1 else hidden.chunk(degree, SEQUENCE_DIM)[0]


def _run_earlier_blocks(
    module: nn.Module, stage: Stage, step: Callable[[], Any]
) -> dict[int, tuple[nn.Module, Any]]:
    """Run the user's step with the blocks before a stage on meta; return each and its output."""
    found: dict[int, tuple[nn.Module, Any]] = {}

    def forward(stub: EarlierBlock, *args: Any, **kwargs: Any) -> Any:
        number, block = shape_of_block(stub)
        output = block(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        found[number] = block, output
        if number == stage.first_block - 1:
            raise StageExit
        return tree_map(_on_device, output)

    with ExitStack() as opened:
        opened.enter_context(stage.hold(MicroBatchState()))
        for stub in module.modules():
            if isinstance(stub, EarlierBlock):
                opened.enter_context(replaced(stub, "forward", partial(forward, stub)))
        with suppress(StageExit):
            step()
    return found


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(
        leaf.requires_grad
    )


def _on_device(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)
