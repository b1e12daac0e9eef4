"""Run a training step without a trace, watch what it does, and compare two of them."""
