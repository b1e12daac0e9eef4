"""What a model declares about how it may be sharded, and what that means at given sizes."""

from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan

__all__ = ["BatchLayout", "ParallelPlan"]
