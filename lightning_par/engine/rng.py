"""The states of the random generators of this process."""

import random
from typing import Any

import numpy as np
import torch

__all__ = ["collect_random_states", "restore_random_states"]


def collect_random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators.

    Args:
        device: That of this rank; its generator is read if it is no CPU.
    """
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states that `collect_random_states` gave.

    Args:
        states: Those of a device are left out if `device` is of another kind.
        device: That of this rank.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
