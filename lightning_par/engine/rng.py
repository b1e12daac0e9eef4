"""Random number generators of this process: seeds, and states that are saved and restored."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

__all__ = [
    "collect_random_states",
    "draws_on_meta",
    "fork_all_rng",
    "fork_torch_rng",
    "is_own_draw",
    "own_draws",
    "real_draws",
    "restore_random_states",
    "seed_all_generators",
    "seed_generators",
    "seed_of",
    "states_alike",
]


_REAL_DRAWS: ContextVar[bool] = ContextVar("real_draws", default=False)
_OWN_DRAWS: ContextVar[bool] = ContextVar("own_draws", default=False)


@contextmanager
def _inside(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def real_draws() -> AbstractContextManager[None]:
    """Inside, modules that only stand for their shapes (on meta) draw random numbers as the real
    ones do, so that what is drawn after them is the same.
    """
    return _inside(_REAL_DRAWS)


def own_draws() -> AbstractContextManager[None]:
    """Inside, random numbers are drawn for a purpose of this package, not by the user's step."""
    return _inside(_OWN_DRAWS)


def is_own_draw() -> bool:
    """Whether the caller is inside of `own_draws`."""
    return _OWN_DRAWS.get()


def draws_on_meta() -> bool:
    """Whether the caller is inside of `real_draws`."""
    return _REAL_DRAWS.get()


def seed_of(*parts: object) -> int:
    """Return a seed of 63 bits that is the same in every process.

    Args:
        parts: Anything whose `repr` is the same everywhere: numbers, text, tuples of them.

    Examples:
        >>> seed_of(1, "blocks.0.weight") == seed_of(1, "blocks.0.weight")
        True
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    # `hash` of text differs between processes (PYTHONHASHSEED), sha256 does not.
    return int.from_bytes(digest[:8], "big") >> 1


def _accelerator(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device.

    Args:
        seed: 63 bits.
        device: On which random numbers are drawn, besides the CPU.
    """
    # torch.manual_seed would also leave a note, with the caller's formatted stack, for every kind
    # of accelerator that is not in use: up to a millisecond in every micro-batch.
    torch.default_generator.manual_seed(seed)
    accelerator = _accelerator(device)
    # Only the device of this rank: the others of the host belong to other processes.
    if accelerator is not None:
        with accelerator.device(device):
            accelerator.manual_seed(seed)


def seed_all_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of Python, of NumPy (with 32 bits of the seed) and of torch.

    Args:
        seed: 63 bits.
        device: That of this rank.
    """
    seed_generators(seed, device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def fork_torch_rng(device: torch.device) -> Iterator[None]:
    """Restore torch's generators of the CPU and of one device at the end.

    Args:
        device: `torch.random.fork_rng` instead saves those of every device, unless it is told.
    """
    accelerator = _accelerator(device)
    state = torch.default_generator.get_state()
    other = None if accelerator is None else accelerator.get_rng_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if accelerator is not None:
            accelerator.set_rng_state(other, device)


@contextmanager
def fork_all_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end.

    Args:
        device: That of this rank.
    """
    states = collect_random_states(device)
    try:
        yield
    finally:
        restore_random_states(states, device)


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


def states_alike(one: Any, other: Any) -> bool:
    """Return whether two states that `collect_random_states` gave are the same."""
    if isinstance(one, dict):
        return all(states_alike(one[key], other[key]) for key in one)
    # NumPy's holds an array. Python's, a tuple of 625 numbers in a tuple, is compared at once.
    if isinstance(one, tuple) and any(isinstance(item, np.ndarray) for item in one):
        return all(map(states_alike, one, other))
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


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
