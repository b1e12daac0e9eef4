"""Predicts the time and the memory of a training step, and searches layouts; no torch needed."""
