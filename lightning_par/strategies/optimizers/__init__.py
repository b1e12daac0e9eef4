"""Optimizers on a mesh: what an update looks at, and steps on whole tensors."""
