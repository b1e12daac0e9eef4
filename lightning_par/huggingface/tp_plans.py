"""Tensor-parallel plans of model families whose own is missing, in the words of transformers.

Keys are patterns below the list of blocks. A family that has a plan of its own needs no entry.
"""

from collections.abc import Mapping

__all__ = ["FAMILY_PLANS"]

_BERT = {
    "*.attention.self.query": "colwise",
    "*.attention.self.key": "colwise",
    "*.attention.self.value": "colwise",
    "*.attention.output.dense": "rowwise",
    "*.intermediate.dense": "colwise",
    "*.output.dense": "rowwise",
}

FAMILY_PLANS: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "electra": _BERT,
    "gpt2": {
        "*.attn.c_attn": "fused_qkv_transposed",
        "*.attn.c_proj": "rowwise_transposed",
        "*.mlp.c_fc": "colwise_transposed",
        "*.mlp.c_proj": "rowwise_transposed",
    },
    "roberta": _BERT,
}
"""`config.model_type` -> pattern -> style."""
