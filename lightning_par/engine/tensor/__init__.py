"""Tensor parallelism: layers whose weights are sharded over the `tp` axis."""
