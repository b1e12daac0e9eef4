"""What a pipeline refuses of calls of the model."""

from lightning_par.errors import PipelineError

__all__ = ["SecondCallError", "called_by_a_hook", "called_outside"]


class SecondCallError(PipelineError):
    """A step has called a block again, as one does that generates text."""

    @classmethod
    def of(cls, block: int) -> "SecondCallError":
        """Say it of the block with this number."""
        return cls(
            "LP406",
            f"block {block} was called twice in one step; a pipeline passes through the blocks "
            "once. Join the inputs of both calls into one batch. To generate text, call "
            "model.generate in a step of evaluation, or sample in on_validation_epoch_end; in "
            "training_step that needs pipeline_parallel_size=1.",
        )


def called_by_a_hook(what: str) -> PipelineError:
    """Return the refusal of a part of the model that a hook calls.

    Args:
        what: FQN of the module, and where it is called.
    """
    return PipelineError(
        "LP407",
        f"a hook calls {what}, which one pipeline stage holds. Call the LightningModule, or the "
        "module that holds all blocks, which passes the stages; or name it in "
        "ParallelPlan(replicated=...).",
    )


def called_outside(block: str) -> PipelineError:
    """Return the refusal of a block of another stage that is called outside of a step.

    Args:
        block: FQN of the block.
    """
    return PipelineError(
        "LP406",
        f"{block} is called outside of a step, and is on another pipeline stage. Call the "
        "LightningModule, or the module that holds all blocks, which passes the stages; or use "
        "pipeline_parallel_size=1.",
    )
