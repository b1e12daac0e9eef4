"""Tokenizers and data modules of the reference models."""
