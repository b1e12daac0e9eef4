"""What a pipeline refuses of calls of the model."""

from lightning_par.errors import PipelineError

__all__ = ["PassedOverError", "SecondCallError", "called_by_a_hook", "called_outside"]


class PassedOverError(PipelineError):
    """A step has not called the blocks of a stage, as one does that has no use for the model."""

    @classmethod
    def before(cls, block: int) -> "PassedOverError":
        """Say it of a stage that ends before the block with this number."""
        return cls(
            "LP406",
            f"the step returned before it had called block {block}. If the step skips blocks or "
            "returns early, let it call the whole model once for every batch; to skip a batch, "
            "remove it in the data set or collate_fn. If the step has a bare `except:` around the "
            "model call, write `except Exception:`: a pipeline stage ends the model call with a "
            "BaseException, which the step must not catch. Or use pipeline_parallel_size=1.",
        )

    @classmethod
    def of_last(cls) -> "PassedOverError":
        """Say it of the last stage."""
        return cls(
            "LP406",
            "the step returned a result without calling the last block. Call the whole model "
            "once for every batch, or use pipeline_parallel_size=1.",
        )


class SecondCallError(PipelineError):
    """A step has called a block again, as one does that generates text."""

    @classmethod
    def of(cls, block: int) -> "SecondCallError":
        """Say it of the block with this number."""
        return cls(
            "LP406",
            f"block {block} was called twice in one step, but a pipeline runs each block once for "
            "each batch. Concatenate the inputs of both calls into one batch. To generate text, "
            "call model.generate in validation_step or on_validation_epoch_end. A training_step "
            "that calls the model several times needs pipeline_parallel_size=1.",
        )


def called_by_a_hook(what: str) -> PipelineError:
    """Return the refusal of a part of the model that a hook calls.

    Args:
        what: FQN of the module, and where it is called.
    """
    return PipelineError(
        "LP407",
        f"a hook calls {what}, but only one pipeline stage holds this module. Call the "
        "LightningModule or the module that contains all blocks, which runs through all stages; "
        "or name the called module in ParallelPlan(replicated=...).",
    )


def called_outside(block: str) -> PipelineError:
    """Return the refusal of a block of another stage that is called outside of a step.

    Args:
        block: FQN of the block.
    """
    return PipelineError(
        "LP406",
        f"{block} is called outside of a step, but another pipeline stage holds this block. Call "
        "the LightningModule or the module that contains all blocks, which runs through all "
        "stages; or use pipeline_parallel_size=1.",
    )
