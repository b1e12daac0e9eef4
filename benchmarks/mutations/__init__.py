"""Faults that are planted in the engine, and what the proofs of a run say about them; see README.md
beside this file.
"""
