"""Gives every Python whose path has this folder the simulated device, if CUDA_SIMULATION is 1."""

import tests.support  # noqa: F401
