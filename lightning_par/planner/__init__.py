"""Foresight: what a run on many devices would do, found out without them."""
