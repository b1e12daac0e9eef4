"""Hugging Face models in place: their plans, derived from the models themselves, and their folders.

transformers is imported only where a model of it is at hand.
"""

from lightning_par.huggingface.attention import divide_attention
from lightning_par.huggingface.chunked_loss import chunk_loss
from lightning_par.huggingface.export import export_folder, MODEL_STATE
from lightning_par.huggingface.lookup import describe_model, find_model
from lightning_par.huggingface.plans import derive_plan, find_huggingface_plan
from lightning_par.huggingface.weights import adapt_weights

__all__ = [
    "MODEL_STATE",
    "adapt_weights",
    "chunk_loss",
    "derive_plan",
    "describe_model",
    "divide_attention",
    "export_folder",
    "find_huggingface_plan",
    "find_model",
]
