"""Checkpoints by global names and shapes, that any layout reads."""
