"""States of loops, callbacks, schedulers and random generators as JSON, their tensors aside.

JSON's own types stand for themselves. Anything else becomes an object with the key ``"$"``, which
says what it is: ``{"$": "tuple", "items": [1, 2]}``. A tensor becomes the name of a file and a key
in it. Reading this runs no code of the file.

What is not data, such as an object among the hyper-parameters, is stored as a pickle, as the
stock Trainer would; it is read only if the user trusts the file and says so.
"""

import base64
import collections
import math
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.checkpoint.storage import DTYPES
from lightning_par.errors import CheckpointError, either

__all__ = ["Decoder", "Encoder", "PickledValueError"]

_PLAIN = (bool, int, str, type(None))
_ITEMS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_PAIRS: dict[type, str] = {
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    dict: "dict",
}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "ordered": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
    "dict": dict,
}


class PickledValueError(CheckpointError):
    """A value was stored as a pickle, which is not read unless the user trusts the file."""


class Encoder:
    """Encodes values and collects their tensors.

    Args:
        file: Name of the safetensors file that the tensors will be in.

    Attributes:
        tensors: Key -> tensor, as collected.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return what stands for `value` in JSON.

        Args:
            value: Any nest.
            where: What the user knows it by, for messages.

        Raises:
            CheckpointError: It cannot be stored at all; names the entry.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": str(value)}
        if kind is list:
            return [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, f"{where}.{k}") for k, v in value.items()}
        if kind in _PAIRS:
            pairs = [
                [self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()
            ]
            return {"$": _PAIRS[kind], "items": pairs}
        if kind in _ITEMS:
            return {"$": _ITEMS[kind], "items": [self.encode(v, where) for v in value]}
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._encode_array(value, where)
        return self._encode_rest(value, where)

    def _encode_array(self, value: Any, where: str) -> Any:
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{where} is sharded over ranks, but this state is that of rank 0 alone. Keep it "
                "in the module's parameters or buffers, or store its full_tensor()."
            )
        kind = "tensor"
        if not isinstance(value, Tensor):
            if value.dtype.hasobject or value.dtype.kind not in "biufc":
                return self._pickle(value, where)
            kind = "ndarray" if isinstance(value, np.ndarray) else "number"
            value = torch.from_numpy(np.array(value))
        if value.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{where} is a tensor of {value.dtype}, which safetensors cannot hold. Use one of "
                f"{either(sorted(str(d) for d in DTYPES.values()))}."
            )
        key = f"{len(self.tensors)}"
        self.tensors[key] = value.detach().cpu().clone()
        return {"$": kind, "file": self._file, "key": key}

    def _encode_rest(self, value: Any, where: str) -> Any:
        if isinstance(value, bytes):
            return {"$": "bytes", "value": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$": "device", "value": str(value)}
        if isinstance(value, PurePath):
            return {"$": "path", "value": str(value)}
        return self._pickle(value, where)

    def _pickle(self, value: Any, where: str) -> Any:
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise CheckpointError(
                f"{where} is a {type(value).__qualname__}, which cannot be stored: {error}. Leave "
                "it out of what is saved, or store numbers, strings, lists, dicts or tensors."
            ) from error
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"$": "pickle", "type": name, "value": base64.b64encode(data).decode()}


class Decoder:
    """Gives back what an `Encoder` encoded.

    Args:
        fetch: Called with a file and a key; returns the tensor.
        unpickle: Whether the user trusts the file.
    """

    def __init__(self, fetch: Callable[[str, str], Tensor], *, unpickle: bool = False) -> None:
        self._fetch, self._unpickle = fetch, unpickle

    def decode(self, value: Any, where: str) -> Any:
        """Return the value that was encoded.

        Args:
            value: From JSON.
            where: What the user knows it by, for messages.

        Raises:
            PickledValueError: There is a pickle in it, and it is not to be read.
        """
        if isinstance(value, list):
            return [self.decode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        kind = value.get("$")
        if kind is None:
            return {k: self.decode(v, f"{where}.{k}") for k, v in value.items()}
        if kind in _MAKE:
            return _MAKE[kind](self.decode(value["items"], where))
        if kind in ("tensor", "ndarray", "number"):
            tensor = self._fetch(value["file"], value["key"])
            if kind == "tensor":
                return tensor
            return tensor.numpy() if kind == "ndarray" else tensor.numpy()[()]
        if kind == "pickle":
            return self._load_pickle(value, where)
        return self._decode_scalar(kind, value["value"], where)

    def _decode_scalar(self, kind: str, text: str, where: str) -> Any:
        if kind == "float":
            return float(text)
        if kind == "bytes":
            return base64.b64decode(text)
        if kind == "dtype":
            dtype = getattr(torch, text, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        if kind == "device":
            return torch.device(text)
        if kind == "path":
            return Path(text)
        raise CheckpointError(f"{where} is a {kind!r}, which this version does not know.")

    def _load_pickle(self, value: dict[str, Any], where: str) -> Any:
        if not self._unpickle:
            raise PickledValueError(
                f"{where} is a {value['type']}, stored as a pickle, which could run code. If you "
                "trust the checkpoint, pass weights_only=False."
            )
        return pickle.loads(base64.b64decode(value["value"]))
