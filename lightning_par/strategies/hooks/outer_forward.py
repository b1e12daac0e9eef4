"""Forwards that a hook calls, outside of every step: samples, summaries, embeddings to log; and,
under a pipeline, those of a step that generates text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_par.engine.collectives import meet
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.pipeline.refusals import called_by_a_hook
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError
from lightning_par.plan.parallel_plan import match_pattern
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.step.absent_parameter import user_line
from lightning_par.strategies.step.parameter_reads import called_by_steps
from lightning_par.strategies.step.runner import StepRunner

__all__ = ["wrap_outer_forwards"]

_JIT: Any = torch.jit


def _meeting_of(steps: StepRunner, options: MeshOptions) -> Callable[[], None]:
    """Return a function for ranks to call before a forward in which they communicate.

    Ranks that share samples or parameters wait for each other in it. In the first run of a hook,
    all ranks also compare what they are about to do.
    """
    mesh, sizes = steps.mesh, steps.mesh.sizes
    # With shards every rank gathers in a forward; without, only those of one replica talk.
    group = dist.group.WORLD if sizes.data_shard > 1 else mesh.replica_group
    assert group is not None
    has_all = group.size() == sizes.world_size

    def wait() -> None:
        # To agree is a collective of all ranks, and replicas without shared parameters may go
        # alone.
        if has_all:
            steps.reads.agree("a forward of the model")
        with steps.reads.paused():
            meet(group, options.timeout)

    return wait


def _traced() -> ConfigurationError:
    return ConfigurationError(
        "LP418",
        "torch.jit.trace was called on a module of which this rank holds only a part "
        "(a logger with log_graph=True calls it). Log the graph in setup, before the "
        "module is sharded: self.logger.experiment.add_graph(self, "
        "self.example_input_array), and pass log_graph=False to the logger.",
    )


def wrap_outer_forwards(
    module: nn.Module,
    resolved: ResolvedPlan,
    steps: StepRunner,
    sharding: Sharding,
    options: MeshOptions,
) -> None:
    """Let forwards that hooks call run as those of steps do: with gathered parameters, and through
    the stages of a pipeline, whose result every stage gets; see `ModelCalls`. The ranks that
    communicate in one meet before, so that a rank which calls the model alone waits where it can be
    named.

    Args:
        module: The user's LightningModule on its mesh; modules in its blocks are left alone.
        resolved: Its resolved plan; what each stage holds is left alone.
        steps: Runs the steps.
        sharding: Gathers parameters.
        options: Of the strategy.
    """
    meeting = _meeting_of(steps, options)
    names = {id(child): name for name, child in module.named_modules()}
    blocks, replicated = resolved.block_names, resolved.plan.replicated

    calls = None if steps.pipeline is None else steps.pipeline.model_calls

    def run(name: str, held: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if calls is None:
            return sharding.call(partial(forward, *args, **kwargs))
        if not held:
            raise called_by_a_hook(f"{name}{user_line()}")
        return calls.run(forward, args, kwargs, is_part=held < len(blocks))

    def in_hooks(name: str, held: int, inner: Forward) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if _JIT.is_tracing():
                raise _traced()
            is_outside = steps.reads.in_hooks or steps.is_outside
            # One that is given a module, as an average of its weights is, is no part of a model.
            if is_outside and any(
                isinstance(each, nn.Module) for each in (*args, *kwargs.values())
            ):
                return inner(*args, **kwargs)
            if is_outside:
                meeting()
                try:
                    with steps.reads.paused(), steps.outside(False):
                        return run(name, held, inner, args, kwargs)
                finally:
                    sharding.release()
            if calls is None or not calls.in_step:
                return inner(*args, **kwargs)
            with steps.reads.paused():
                return run(name, held, inner, args, kwargs)

        return forward

    for child in (module, *called_by_steps(module, blocks)):
        name = names[id(child)]
        if not any(match_pattern(pattern, name) for pattern in replicated):
            # How many blocks are inside of it: all, some, or none.
            held = sum(not name or block.startswith(f"{name}.") for block in blocks)
            wrap_forward(child, partial(in_hooks, name, held), "hooks")
