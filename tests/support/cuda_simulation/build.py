"""Compiles the simulated device, once for every version of its sources, torch and Python.

The libraries lie in the folder of caches, outside of the checkout. Neither this module nor what it
imports may import torch: the first library has to be there before.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NAME", "Libraries", "build", "missing"]

NAME = "cuda_simulation"
"""Of the Python extension."""

_NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-g0", "-fPIC", "-std=c++20", "-w", "-DUSE_C10D_GLOO")
_PARTS = ("streams", "memory", "kernels", "nccl", "module")


@dataclass(frozen=True)
class Libraries:
    """Where the compiled device is.

    Args:
        entry: Has to be loaded before torch.
        device: Loads torch's libraries; is a Python extension, too.
    """

    entry: Path
    device: Path


def missing():
    """Says what this machine lacks to compile the device; None if nothing."""
    if shutil.which("g++") is None:
        return "the simulated CUDA device needs g++"
    if importlib.util.find_spec("torch") is None:
        return "the simulated CUDA device needs torch"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated CUDA device needs the headers of Python"
    if importlib.metadata.version("torch").rpartition("+")[2].startswith("cu"):
        return "the simulated CUDA device needs a torch without CUDA"
    return None


def build():
    """Gives the libraries, compiled now (a minute or two) or earlier."""
    folder = _cache() / "cuda_simulation"
    folder.mkdir(parents=True, exist_ok=True)
    shared = _digest(*sorted(_NATIVE.glob("*.hpp")))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entry = _NATIVE / "entry.cpp"
        return Libraries(
            entry=_made(folder / f"entry-{_digest(entry)}.so", "-shared", entry),
            device=_link(folder, shared),
        )


def _cache():
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/var/tmp"), ".cache")
    return Path(base, "lightning_par")


def _digest(*sources):
    versions = importlib.metadata.version("torch"), sysconfig.get_config_var("EXT_SUFFIX")
    digest = hashlib.sha256(repr((_FLAGS, versions)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _link(folder, shared):
    """Compiles the parts that changed, and links all of them."""
    sources = [_NATIVE / f"{part}.cpp" for part in _PARTS]
    targets = [folder / f"{s.stem}-{shared}-{_digest(s)}.o" for s in sources]
    whole = folder / f"device-{shared}-{_digest(*sources)}.so"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda t, s: _made(t, "-c", s), targets, sources))
    where = [f"-L{_torch() / 'lib'}", f"-Wl,-rpath,{_torch() / 'lib'}"]
    needed = [f"-l{library}" for library in ("torch", "torch_cpu", "c10", "torch_python")]
    return _made(whole, "-shared", *parts, *where, *needed)


def _torch():
    return Path(importlib.util.find_spec("torch").origin).parent


def _made(target, *arguments):
    """Gives a file, made by g++ unless it is there."""
    if target.exists():
        return target
    headers = [_torch() / "include", _torch() / "include/torch/csrc/api/include"]
    include = [f"-I{path}" for path in [*headers, sysconfig.get_path("include")]]
    unfinished = target.with_suffix(f".unfinished{target.suffix}")
    command = ["g++", *_FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", *include, *arguments]
    done = subprocess.run([*map(str, command), "-o", unfinished], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ could not compile the simulated CUDA device:\n{done.stderr}")
    unfinished.rename(target)
    return target
