"""A world of which one rank is there: what it would hear from the others, it hears from itself.

Collectives move nothing: a tensor that is real keeps this rank's values. Objects that others would
send are this rank's own. Of a pipeline, the earlier stages answer with the shapes of what their
blocks give, which are run without weights, and the last one with losses of 1.
"""

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import nn, Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_par.engine.pipeline.actions import Schedule
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.stage import (
    EarlierBlock,
    Message,
    MicroBatchState,
    number_of_block,
    Stage,
    StageExit,
    stands_for,
    TokenCount,
)
from lightning_par.engine.tensor.sequence_parallel import SEQUENCE_DIM
from lightning_par.engine.tensor_tree import on_first_tensor, pack, PackedTree, TreeBroadcast
from lightning_par.observe.weightless import WeightlessTensors
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.processes.host_status import OtherHost
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import tree_flatten, tree_map

__all__ = ["LoneEnvironment", "LoneWorld", "lone_world"]


class LoneEnvironment(ClusterEnvironment):
    """Environment of one rank of a world, whose other ranks nobody starts.

    Args:
        rank: Global rank.
        num_nodes: Number of nodes.
        num_local: Ranks of a node.
    """

    def __init__(self, rank: int, num_nodes: int, num_local: int) -> None:
        self._rank, self.num_nodes, self._num_local = rank, num_nodes, num_local

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
        return self.num_nodes * self._num_local

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
    send = dist.broadcast_object_list
    try:
        # Users call it, too; torch would unpickle what has not arrived.
        with replaced(dist, "broadcast_object_list", partial(_own_objects, send)):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _own_objects(
    send: Callable[..., None], objects: list[Any], src: int = 0, group: Any = None, **options: Any
) -> None:
    """Leave in `objects` what this rank has, with the calls that torch makes for it."""
    if src == dist.get_rank():
        send(objects, src, group, **options)
        return
    # The same calls as torch makes: a length, then the bytes, so that they are counted.
    sizes = torch.tensor([len(pickle.dumps(each)) for each in objects])
    dist.broadcast(sizes, src, group=group)
    dist.broadcast(torch.empty(int(sizes.sum()), dtype=torch.uint8), src, group=group)


class LoneWorld:
    """The `World` of a run whose other ranks are not there.

    Args:
        strategy: Of a Trainer in a `lone_world`.
        live: Does not count what other ranks would hold; entered by the caller.
    """

    has_values = False

    def __init__(self, strategy: MeshStrategy, live: WeightlessTensors) -> None:
        self.channel = _LoneChannel
        self.executor = partial(_LoneExecutor, strategy, live)
        self.broadcast = partial(TreeBroadcast, is_source=True)

    def timeout(self, chosen: timedelta | None) -> None:
        """Return None: calls that move nothing end at once."""

    def open_status_file(self, *given: Any) -> tuple[None, list[OtherHost]]:
        """Return no file: nobody watches ranks that are not there."""
        return None, []


class _LoneChannel(Channel):
    """A channel that receives the headers which were put into it.

    Attributes:
        headers: Signature -> header.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.headers: dict[Any, PackedTree] = {}

    @override
    def receive_header(self, signature: Any) -> PackedTree:
        header = self.headers[signature]
        text = pickle.dumps(header)
        # As a real receive makes them: two calls, which the volume counts.
        for buffer in (torch.tensor([len(text)]), torch.empty(len(text), dtype=torch.uint8)):
            dist.recv(buffer, self._source, group=self._group)
        return header


class _LoneExecutor(PipelineExecutor):
    """An executor that answers for the other stages of its pipeline.

    Args:
        strategy: Knows the module, once it has been set up.
        live: As for `LoneWorld`.
        given: What `PipelineExecutor` takes.
    """

    def __init__(self, strategy: MeshStrategy, live: WeightlessTensors, *given: Any) -> None:
        super().__init__(*given)
        self._strategy, self._live = strategy, live
        self._weights: dict[nn.Module, dict[str, Tensor]] = {}
        self._outputs: dict[Any, Any] = {}

    @override
    def run(
        self,
        schedule: Schedule,
        step: Callable[[int], Any],
        signatures: Sequence[Hashable],
        scaled_loss_of: Callable[[int, Any], Tensor] | None,
        *more: Any,
        **options: Any,
    ) -> PipelineRun:
        for stage in self.stages:
            # What arrives at this rank's stages comes from the rank before.
            link = None if stage.is_first else self.links[stage.index - 1].activations
            for index, signature in enumerate(signatures):
                if isinstance(link, _LoneChannel) and signature not in link.headers:
                    link.headers[signature] = self._header(stage, partial(step, index))
        # Sends go nowhere, and receives find what was put there above.
        done = super().run(schedule, step, signatures, scaled_loss_of, *more, **options)
        if not any(stage.is_last for stage in self.stages):
            # The last stage's results, which it would broadcast.
            for index in range(len(signatures)):
                done.results[index] = torch.ones(())
                if scaled_loss_of is not None:
                    scaled_loss_of(index, done.results[index])
        return done

    def _header(self, stage: Stage, step: Callable[[], Any]) -> PackedTree:
        """Return the header of what the stage before `stage` sends for a micro-batch."""
        found = self._run_earlier_blocks(stage, step)
        # On this rank nobody holds what other stages compute.
        with self._live.aside():
            return self._pack(stage, found)

    def _pack(self, stage: Stage, found: dict[int, tuple[nn.Module, Any]]) -> PackedTree:
        received: Message = {}
        own_tokens = partial(self._own_tokens, stage.tokens)
        for index in range(stage.index):
            earlier = Stage(index, stage.bounds, stage.carried, stage.kept)
            earlier.tokens = stage.tokens
            earlier.current = MicroBatchState(received=received)
            for number in range(earlier.first_block, earlier.end_block):
                block, output = found[number]
                earlier.record(number, block, None, on_first_tensor(own_tokens, output))
            received = earlier.outgoing(earlier.current)
        header, _ = pack(received)
        return header

    def _own_tokens(self, tokens: TokenCount | None, hidden: Tensor) -> Tensor:
        """Return hidden states as they are between blocks: sharded along T, or whole."""
        if tokens is None:
            return hidden
        size, degree = hidden.shape[SEQUENCE_DIM], self._strategy.sizes.tensor
        tokens.whole = size if size % degree else None
        # The first part, the largest: parts of other ranks differ by a token at most.
        return hidden.chunk(degree, SEQUENCE_DIM)[0]

    def _run_earlier_blocks(
        self, stage: Stage, step: Callable[[], Any]
    ) -> dict[int, tuple[nn.Module, Any]]:
        """Run the user's step with the blocks before a stage; return each and its output."""
        found: dict[int, tuple[nn.Module, Any]] = {}

        def forward(stub: EarlierBlock, *args: Any, **kwargs: Any) -> Any:
            number, (_, block) = number_of_block(stub), stands_for(stub)
            with self._live.aside():
                output = self._output(stage, block, args, kwargs)
                found[number] = block, output
                # The rest of the step is not for these stages.
                if number == stage.first_block - 1:
                    raise StageExit
                # A copy, since the next block may write into its input.
                return tree_map(_copy, output)

        module = self._strategy.parallel_model.module
        with ExitStack() as opened:
            # The step has to find a current micro-batch, as in a run.
            opened.enter_context(stage.hold(MicroBatchState()))
            for stub in module.modules():
                if isinstance(stub, EarlierBlock):
                    opened.enter_context(replaced(stub, "forward", partial(forward, stub)))
            with suppress(StageExit):
                step()
        return found

    def _output(self, stage: Stage, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a block gives; what blocks alike give for arguments alike is alike."""
        leaves, nest = tree_flatten((args, kwargs))
        # By shapes alone, as there are no values.
        arguments = [_layout(leaf) for leaf in leaves]
        weights = [(name, _layout(t)) for name, t in block.state_dict().items()]
        alike = str(block), str(nest), str(arguments), str(weights), torch.is_grad_enabled()
        # Attributes that blocks carry from stage to stage are there after their own forward only.
        if stage.carried or alike not in self._outputs:
            output = torch.func.functional_call(block, self._weights_of(block), args, kwargs)
            self._outputs[alike] = tree_map(_copy, output)
        return self._outputs[alike]

    def _weights_of(self, block: nn.Module) -> dict[str, Tensor]:
        """Return weights and buffers, on the CPU, of a block that has them on meta."""
        if block not in self._weights:
            tensors = [*block.named_parameters(), *block.named_buffers()]
            self._weights[block] = {
                name: torch.zeros(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad)
                for name, t in tensors
            }
        return self._weights[block]


def _layout(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
