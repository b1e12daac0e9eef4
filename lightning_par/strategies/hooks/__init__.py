"""Hooks of users outside of the steps, in which a divided module looks whole."""
