"""Activation checkpointing and activation offloading."""
