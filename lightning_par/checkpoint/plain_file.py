"""The form of a checkpoint that is one file: what `torch.save` writes, and records of ours in it.

`torch.save` writes a zip archive: a pickle of names and shapes, and a record of bytes per storage,
uncompressed. Here it writes the archive without those bytes, and tells nobody where they go; the
directory of the archive does. Whoever knows the place of a storage can write its slices.

Records of ours are below ``lightning_par/``; torch does not look at them::

    lightning_par/state-00000-of-00004.json, .safetensors   as in a folder
    lightning_par/manifest.json                             written last; with the index

Nothing of the pickle is read here. Like a file that torch writes after
`torch.serialization.set_crc32_options(False)`, the archive has no checksums of its own for tensors:
torch looks at none, `unzip -t` calls them bad, and those of the manifest take their place.
"""

import mmap
import pickle
import struct
import zipfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_par.errors import CheckpointError, MissingCheckpointError
from lightning_par.upstream.tensor import storage_key

__all__ = [
    "append_records",
    "check_state",
    "damage",
    "make_blanks",
    "read_manifest",
    "reading_plain",
    "write_skeleton",
]

_OURS = "lightning_par/"
_MANIFEST = f"{_OURS}manifest.json"
_VERSION = "pytorch-lightning_version"
_TYPES: dict[str, tuple[type, Any]] = {
    _VERSION: (str, ""),
    "state_dict": (Mapping, {}),
    "loops": (Mapping, {}),
    "callbacks": (Mapping, {}),
    "lr_schedulers": (Sequence, ()),
}
"""Parts of what a Trainer dumps, by its keys: their types, and what stands for a missing one."""
_NO_PICKLE = "Unsupported operand", "String is too long"
"""What torch says of bytes that no pickle begins with; of other refusals it says what they need."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of an entry of a zip archive; its last numbers are the lengths of what precedes the bytes."""

K = TypeVar("K", bound=Hashable)


def read_manifest(path: Path) -> bytes | None:
    """Return the manifest of a checkpoint that is one file; None if it has none.

    Args:
        path: A regular file, or a link to one.

    Raises:
        CheckpointError: It cannot be read.
    """
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            # The archive's records are below a folder that bears the file's name, which may have
            # changed.
            found = [i for i in archive.infolist() if i.filename.endswith(f"/{_MANIFEST}")]
            if not found:
                return None
            # A compressed record could be a bomb; and its bytes would not be at the place we
            # compute.
            if found[0].compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    "LP502",
                    f"{path} is no checkpoint of lightning_par: its record {_MANIFEST} is "
                    "compressed, but lightning_par does not compress it. Use another "
                    "checkpoint.",
                )
            return archive.read(found[0])
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(
            "LP502",
            f"{path} is damaged: its record {_MANIFEST} cannot be read ({error}). Use another "
            "checkpoint.",
        ) from error


@contextmanager
def reading_plain(path: Any, *, trusts: bool) -> Iterator[None]:
    """Context in which torch, or a plugin of Lightning, reads a file.

    Args:
        path: The file, or its URL.
        trusts: Whether pickles in it may be loaded.

    Raises:
        CheckpointError: In place of whatever a damaged file makes torch raise.
    """
    try:
        yield
    except FileNotFoundError as error:
        text = f"the checkpoint {path} does not exist. Pass the path of a checkpoint as ckpt_path."
        raise MissingCheckpointError("LP501", text) from error
    except pickle.UnpicklingError as error:
        told = str(error)
        if not trusts and not _is_damaged(path) and not any(text in told for text in _NO_PICKLE):
            raise CheckpointError(
                "LP504",
                f"{path} holds Python objects besides tensors and numbers. Reading such objects "
                "could run code. If you trust the checkpoint, pass weights_only=False to fit or "
                f"load_from_checkpoint. ({told.splitlines()[0]})",
            ) from error
        raise damage(path, error) from error
    # A missing package or too little memory is no damage.
    except (CheckpointError, ImportError, MemoryError):
        raise
    # Any: lengths and types that a damaged pickle names go to functions of Python and of torch,
    # each of which refuses them in its own way.
    except Exception as error:
        raise damage(path, error) from error


def _is_damaged(path: Any) -> bool:
    """Whether the pickle of an archive has not the checksum that was written with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if _short(info) == "data.pkl":
                    archive.read(info)
    # Of a file that is no archive, or of a URL, nothing is known.
    except OSError:
        return False
    except zipfile.BadZipFile:
        return zipfile.is_zipfile(path)
    return False


def damage(path: Any, error: Exception) -> CheckpointError:
    """Return the error of a damaged file, with what torch or Python say of it."""
    said = str(error).partition("\n")[0]
    # Texts of torch speak for themselves, those of Python ('x', of a KeyError) do not.
    if not isinstance(error, RuntimeError | zipfile.BadZipFile):
        said = f"{type(error).__name__}: {said}"
    return CheckpointError(
        "LP502",
        f"{path} cannot be read as a checkpoint ({said}), so the file is damaged or of another "
        "kind. Pass the path of another checkpoint.",
    )


def check_state(state: Any, path: Any) -> None:
    """Refuse what is no checkpoint of Lightning, before Lightning takes it apart.

    Args:
        state: What a file or a folder holds.
        path: Its path, for the message.

    Raises:
        CheckpointError: It is no dict, was not dumped by a Trainer, or a part of it is of a wrong
            type.
    """
    if not isinstance(state, Mapping) or _VERSION not in state:
        raise CheckpointError(
            "LP501",
            f"{path} is not a checkpoint of Lightning: it has no entry {_VERSION!r}, which every "
            "Trainer writes. If the file holds only the weights of a model, read them with "
            "torch.load and load_state_dict.",
        )
    wrong = [k for k, (kind, none) in _TYPES.items() if not isinstance(state.get(k, none), kind)]
    if wrong:
        kinds = ", ".join(f"its entry {key!r} is a {type(state[key]).__name__}" for key in wrong)
        raise CheckpointError(
            "LP502", f"{path} is not a valid checkpoint: {kinds}. Use another checkpoint."
        )


def make_blanks(specs: Mapping[K, tuple[torch.dtype, tuple[int, ...]]]) -> dict[K, Tensor]:
    """Return contiguous tensors to save without their bytes; no memory is used for them.

    Args:
        specs: Key -> dtype and shape.
    """
    # All tensors of a dtype share pages that are never touched. Fake tensors would do as well, but
    # take a hundred times as long to make.
    sizes: dict[torch.dtype, int] = {}
    for dtype, shape in specs.values():
        # A mapping for each dtype, since `torch.save` refuses tensors of two dtypes at one
        # address.
        sizes[dtype] = max(sizes.get(dtype, 1), torch.Size(shape).numel())
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = {d: mmap.mmap(-1, size * d.itemsize, flags=private) for d, size in sizes.items()}

    def blank(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        numel = torch.Size(shape).numel()
        # `frombuffer` refuses a count of 0.
        if not numel:
            return torch.empty(shape, dtype=dtype)
        # Each call makes a storage object of its own over the shared pages, and these are what
        # `torch.save` numbers: two blanks get two records, though they begin at one address.
        return torch.frombuffer(pages[dtype], dtype=dtype, count=numel).view(shape)

    return {key: blank(dtype, shape) for key, (dtype, shape) in specs.items()}


def write_skeleton(
    path: Path, value: Any, more: Mapping[str, bytes | int]
) -> tuple[dict[str, tuple[torch.UntypedStorage, int]], dict[str, tuple[int, int]]]:
    """Write what `torch.save` writes, without the bytes of tensors, and records of ours.

    Args:
        path: File to write.
        value: Any value that `torch.save` takes.
        more: Records of ours, as `append_records` takes them.

    Returns:
        Record -> the storage whose bytes it is to hold, and the place of its first byte; and what
        `append_records` returns.

    Raises:
        CheckpointError: `value` holds a tensor that has no plain storage.
        OSError: The disk is full, for example; or what pickling raises.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        """Notes storages in the order in which `torch.save` numbers them."""

        def reducer_override(self, obj: Any) -> Any:
            # What `torch.save`'s persistent_id would see, in the same order; the record
            # `data/<n>` is the n-th storage it meets.
            if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_meta:
                storage = obj.untyped_storage()
                storages.setdefault(storage_key(storage), storage)
            return NotImplemented

    # Leaves holes of the right length where the bytes would be.
    with torch.serialization.skip_data():
        # The module is only asked for `Pickler` and its name.
        torch.save(value, path, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="pickle"))
    expected = {f"data/{i}": storage for i, storage in enumerate(storages.values())}
    # Opened once: its directory names each tensor, and is read anew each time.
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as archive:
        found = {_short(info): info for info in archive.infolist()}
        sizes = {name: info.file_size for name, info in found.items() if name[:5] == "data/"}
        # A storage that was met elsewhere (a bare storage, a sparse tensor's parts) would shift
        # all numbers: bytes would go to the wrong tensor. Better no file.
        if sizes != {name: storage.nbytes() for name, storage in expected.items()}:
            raise CheckpointError(
                "LP505",
                "the state of a callback, a module or an optimizer contains a torch storage or a "
                "sparse or quantized tensor, which cannot be written to a checkpoint that is one "
                "file. Store a plain tensor, or use checkpoint_format='folder'.",
            )
        tensors = {n: (storage, _place(file, found[n])) for n, storage in expected.items()}
        return tensors, _append(archive, file, more)


def append_records(path: Path, records: Mapping[str, bytes | int]) -> dict[str, tuple[int, int]]:
    """Append records of ours to an archive.

    Args:
        path: The archive.
        records: Name below ``lightning_par/`` -> its content, or the length of an empty one.

    Returns:
        Name -> place of its first byte, and its length; also of torch's own records but those of
        tensors.

    Raises:
        OSError: The disk is full, for example.
    """
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as archive:
        return _append(archive, file, records)


def _append(
    archive: zipfile.ZipFile, file: Any, records: Mapping[str, bytes | int]
) -> dict[str, tuple[int, int]]:
    # All records of torch's archive are in one folder; its reader wants that of ours there, too.
    folder = archive.namelist()[0].partition("/")[0]
    for name, content in records.items():
        info = zipfile.ZipInfo(f"{folder}/{_OURS}{name}")
        # force_zip64: the local header must have room for sizes over 4 GiB before they are known.
        with archive.open(info, "w", force_zip64=True) as record:
            if isinstance(content, bytes):
                record.write(content)
                continue
            # Zeros in blocks: a record of the states of a rank may be larger than one wants in
            # memory.
            for low in range(0, content, 1 << 20):
                record.write(bytes(min(1 << 20, content - low)))
    return {
        _short(info): (_place(file, info), info.file_size)
        for info in archive.infolist()
        if not _short(info).startswith("data/")
    }


def _short(info: zipfile.ZipInfo) -> str:
    """Return the name of a record without that of the archive."""
    return info.filename.partition("/")[2].removeprefix(_OURS)


def _place(file: Any, info: zipfile.ZipInfo) -> int:
    # From the local header: its extra field may differ in length from the directory's, as torch
    # pads it so that tensors begin at multiples of 64.
    file.seek(info.header_offset)
    lengths: tuple[int, int] = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + sum(lengths)
