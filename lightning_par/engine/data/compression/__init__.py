"""Gradient compression on the data axis."""
