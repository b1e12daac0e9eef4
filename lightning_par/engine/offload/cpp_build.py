"""Compile a C++ source of this package on first use, and cache the library.

A library is named by a hash of its source, the compiler's options, and the macros that it defines.
These hold its version and every instruction set that it may use on this machine, so that machines
of different kinds can share a cache.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_par.errors import OffloadError

__all__ = ["COMPILERS", "build_library", "find_compiler"]

COMPILERS = ("c++", "g++", "clang++")
"""Names of compilers that are looked for, in order."""

_OPTIONS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # no fused multiply-add: the same bits for every split of the work
)
_TUNED = ("-march=native", "-mprefer-vector-width=512")
_TIMEOUT_S = 120
"""A compilation takes about two seconds."""


def find_compiler(names: Sequence[str] = COMPILERS) -> str:
    """Return the path of the first compiler that is installed.

    Raises:
        OffloadError: None of `names` is.
    """
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise OffloadError(
        "LP601",
        f"no C++ compiler: none of {', '.join(names)} is on the PATH. Install one (Debian: g++, "
        "macOS: xcode-select --install), or use cpu_kernel='torch'.",
    )


def build_library(source: Path, folder: Path, compiler: str | None = None) -> Path:
    """Return the shared library of one C++ file; compile it if it is not cached.

    Several processes may do so at the same time: each writes its own file and renames it.

    Args:
        source: The C++ file.
        folder: The cache; created if it is missing.
        compiler: Path of the compiler; None: the first of `COMPILERS`.

    Raises:
        OffloadError: There is no compiler, it failed, or the cache is not writable, or is writable
            by others.
    """
    compiler = find_compiler() if compiler is None else compiler
    # Macros name the instruction sets: a cache on a shared disk serves machines that differ.
    tuned, macros = _target(compiler)
    text = source.read_bytes()
    parts = [text, " ".join([*_OPTIONS, *tuned]).encode(), macros]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    library = folder / f"{source.stem}-{key}.so"
    if folder.is_dir() and not _is_private(folder):
        raise OffloadError(
            "LP612",
            f"the folder {folder} holds compiled code, but other users can write to the folder, "
            "or it belongs to another user. They could put code there that your processes run. If "
            f"the folder is yours, use `chmod 700 {folder}`. Otherwise set XDG_CACHE_HOME to "
            "another folder.",
        )
    # Loading a library runs code: one that somebody else may have written is compiled anew.
    if library.is_file() and _is_private(library):
        return library
    try:
        # For this user only, as what is in it will be loaded.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=library.stem, suffix=".part", dir=folder)
    except OSError as error:
        raise OffloadError(
            "LP601",
            f"{source.name} cannot be compiled, since no file can be written to the folder "
            f"{folder} ({error.strerror}). Set XDG_CACHE_HOME to another folder, or use "
            "cpu_kernel='torch'.",
        ) from error
    os.close(handle)
    try:
        _run([compiler, *_OPTIONS, *tuned, str(source), "-o", partial])
        Path(partial).chmod(0o700)
        # Renamed when complete: another process loads a whole file or none.
        Path(partial).replace(library)
    finally:
        Path(partial).unlink(missing_ok=True)
    return library


def _is_private(path: Path) -> bool:
    """Whether only this user, or root, can have written a file or folder."""
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _target(compiler: str) -> tuple[tuple[str, ...], bytes]:
    """Return the options that tune for this machine, and the macros that they define."""
    # Not every compiler knows -march=native or the width of vectors: drop what it refuses.
    ask = ["-dM", "-E", "-x", "c++", os.devnull]
    # From the best options to those that every compiler has.
    for tuned in (_TUNED, _TUNED[:1]):
        try:
            return tuned, _run([compiler, *tuned, *ask])
        except OffloadError:
            continue
    return (), _run([compiler, *ask])


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OffloadError(
            "LP601",
            f"the C++ compiler {command[0]} could not be run: {error}. Repair it, put another "
            "c++ first on the PATH, or use cpu_kernel='torch'.",
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-1000:]
        raise OffloadError(
            "LP601",
            f"the C++ compiler {command[0]} failed with status {done.returncode}: "
            f"{said or 'it printed nothing'}. Repair it, put another c++ first on the PATH, or use "
            "cpu_kernel='torch'.",
        )
    return done.stdout
