"""The environment variables of the ranks that `ranks.py` runs tests on."""

import sys

__all__ = ["fixed_environment", "world_environment"]


def fixed_environment():
    """One thread per process, and gloo on the loopback interface."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return variables | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def world_environment(world):
    """What torchrun sets; the process group exists already, so nothing binds the port."""
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
