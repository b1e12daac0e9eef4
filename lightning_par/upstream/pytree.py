"""Nests of lists, tuples, dicts and registered classes (`torch.utils._pytree`).

torch has no public module for them in 2.11 and 2.13. Only its own knows what else is registered,
such as the outputs of transformers, and hands its specs to `torch.export` and the compiler.

====================  =============================================================
`tree_flatten`        the leaves, and a spec to rebuild the nest
`tree_leaves`         the leaves
`tree_map`            the nest with a function applied to every leaf
`tree_unflatten`      the nest of a spec with other leaves
====================  =============================================================
"""

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
