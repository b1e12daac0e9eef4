"""Compiling a C++ source of this package on the machine that runs it, once.

A library is named by a hash of its source, of the options, and of the macros that the compiler
defines. These hold its version and every instruction set that it may use here, so that machines of
different kinds can share a folder.
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
"""What is looked for, in order."""

_OPTIONS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
_TUNED = ("-march=native", "-mprefer-vector-width=512")
_TIME = 120  # seconds, of a compilation that takes about two


def find_compiler(names: Sequence[str] = COMPILERS) -> str:
    """Return the path of a C++ compiler.

    Raises:
        OffloadError: None of `names` is installed.
    """
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise OffloadError(
        f"no C++ compiler: none of {', '.join(names)} is on the PATH. Install one (Debian: g++, "
        "macOS: xcode-select --install), or use cpu_kernel='torch'."
    )


def build_library(source: Path, folder: Path, compiler: str | None = None) -> Path:
    """Return a shared library made of one C++ file; what has been compiled before is used again.

    Processes may build the same at the same time: each writes a file of its own and renames it.

    Args:
        source: The file.
        folder: Where libraries are kept; made if it is missing.
        compiler: Path of the compiler; None looks for one.

    Raises:
        OffloadError: There is no compiler, it failed, or the folder cannot be written.
    """
    compiler = find_compiler() if compiler is None else compiler
    tuned, macros = _target(compiler)
    text = source.read_bytes()
    parts = [text, " ".join([*_OPTIONS, *tuned]).encode(), macros]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    library = folder / f"{source.stem}-{key}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=library.stem, suffix=".part", dir=folder)
    except OSError as error:
        raise OffloadError(
            f"{source.name} cannot be compiled: the folder {folder} cannot be written "
            f"({error.strerror})."
        ) from error
    os.close(handle)
    try:
        _run([compiler, *_OPTIONS, *tuned, str(source), "-o", partial])
        Path(partial).replace(library)
    finally:
        Path(partial).unlink(missing_ok=True)
    return library


def _target(compiler: str) -> tuple[tuple[str, ...], bytes]:
    """Return the options for this machine that a compiler knows, and its macros under them."""
    ask = ["-dM", "-E", "-x", "c++", os.devnull]
    for tuned in (_TUNED, _TUNED[:1]):
        try:
            return tuned, _run([compiler, *tuned, *ask])
        except OffloadError:
            continue
    return (), _run([compiler, *ask])


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIME, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OffloadError(f"the compiler {command[0]} did not run: {error}.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-1000:]
        raise OffloadError(
            f"the compiler {command[0]} failed with status {done.returncode}: {said or 'no text'}."
        )
    return done.stdout
