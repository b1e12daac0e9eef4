"""Hugging Face models in place: their plans, derived from the models themselves.

transformers is imported only where a model of it is at hand.
"""

from lightning_par.huggingface.plans import derive_plan, find_huggingface_plan

__all__ = ["derive_plan", "find_huggingface_plan"]
