"""JSON codec for the states of loops, callbacks, schedulers and random generators.

Values of JSON's own types are stored as they are. Others become an object with the key ``"$"``,
which names their type: ``{"$": "tuple", "items": [1, 2]}``. A tensor becomes the name of a
safetensors file and a key in it. Decoding runs no code from the file.

Objects of other classes, for example among the hyper-parameters, are stored as a pickle, as
Lightning's Trainer does; pickles are loaded only if the user trusts the file.
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

from lightning_par.checkpoint.storage import DTYPES, how_to_store
from lightning_par.errors import CheckpointError

__all__ = ["Decoder", "Encoder", "PickledValueError"]

_JSON_SCALARS = (bool, int, str, type(None))
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: dict[type, str] = {
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    dict: "dict",
}
_CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    **{name: kind for kind, name in {**_SEQUENCES, **_MAPPINGS}.items()},
    "counter": lambda pairs: collections.Counter(dict(pairs)),  # it would count the pairs
}


class PickledValueError(CheckpointError):
    """A value was stored as a pickle, but pickles may not be loaded."""


class Encoder:
    """Encoder of values as JSON types, which collects their tensors.

    Args:
        file: Name of the safetensors file in which the caller will store `tensors`.

    Attributes:
        tensors: Key -> copy of a tensor on the CPU, of all values encoded so far.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return a value as JSON types.

        Args:
            value: Any nest of containers, scalars, tensors and arrays.
            where: Name of the value for the user, such as ``"callbacks.EarlyStopping.patience"``,
                for messages.

        Raises:
            CheckpointError: A DTensor, a sparse or nested tensor, a dtype that safetensors lacks,
                or an object that cannot be pickled; names the entry.
        """
        # type() and not isinstance(): a subclass (bool of int, a named tuple) must come back as
        # what it was, or go the way of the pickle.
        kind = type(value)
        if kind in _JSON_SCALARS:
            return value
        if kind is float:
            # JSON has no NaN or infinity, though Python's writer would emit them.
            return value if math.isfinite(value) else {"$": "float", "value": str(value)}
        # A list is the one container that JSON gives back as what it was.
        if kind is list:
            return [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        # A dict with other keys, or with our own "$", is stored as a list of pairs.
        if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, f"{where}.{k}") for k, v in value.items()}
        if kind in _MAPPINGS:
            pairs = [
                [self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()
            ]
            return {"$": _MAPPINGS[kind], "items": pairs}
        # A named tuple is no `tuple` here, and goes the way of the pickle: its class is code.
        if kind in _SEQUENCES:
            return {"$": _SEQUENCES[kind], "items": [self.encode(v, where) for v in value]}
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._encode_array(value, where)
        return self._encode_rest(value, where)

    def _encode_array(self, value: Any, where: str) -> Any:
        if isinstance(value, DTensor):
            raise CheckpointError(
                "LP505",
                f"{where} is a tensor that is sharded over ranks, but only rank 0 writes this "
                "state. Keep the tensor in the module's parameters or buffers, or store its "
                "full_tensor().",
            )
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            kind, dense = (
                ("nested", "to_padded_tensor(0)") if value.is_nested else ("sparse", "to_dense()")
            )
            raise CheckpointError(
                "LP505",
                f"{where} is a {kind} tensor, which a safetensors file cannot hold. Store its "
                f"{dense}, or store its parts as plain tensors.",
            )
        kind = "tensor"
        if not isinstance(value, Tensor):
            # Bool, integers, floats and complex are what a tensor can hold.
            if value.dtype.hasobject or value.dtype.kind not in "biufc":
                return self._pickle(value, where)
            kind = "ndarray" if isinstance(value, np.ndarray) else "number"
            # A copy with dims made of a scalar, and of an array that may be read-only or not
            # contiguous.
            value = torch.from_numpy(np.array(value))
        if value.dtype not in DTYPES.values():
            raise CheckpointError(
                "LP505",
                f"{where} cannot be saved: it is a tensor of {value.dtype}, which a safetensors "
                f"file cannot hold. {how_to_store(value)}",
            )
        # Numbers: a path of keys could hold what a safetensors key may not, and two could be
        # equal.
        key = f"{len(self.tensors)}"
        # A clone, since training goes on while a background save writes it.
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
        # Pickled at once, on the rank that saves: what cannot be stored is said by `save` and not
        # by a thread.
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise CheckpointError(
                "LP505",
                f"{where} is a {type(value).__qualname__}, which cannot be stored: {error}. Leave "
                "it out of what is saved, or store numbers, strings, lists, dicts or tensors.",
            ) from error
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"$": "pickle", "type": name, "value": base64.b64encode(data).decode()}


class Decoder:
    """Decoder of what an `Encoder` encoded.

    Args:
        fetch: Function from the name of a file and a key to the tensor.
        unpickle: Whether pickles may be loaded, which can run code.
    """

    def __init__(self, fetch: Callable[[str, str], Tensor], *, unpickle: bool = False) -> None:
        self._fetch, self._unpickle = fetch, unpickle

    def decode(self, value: Any, where: str) -> Any:
        """Return the value that was encoded.

        Args:
            value: JSON types that `Encoder.encode` returned.
            where: Name of the value for the user, for messages.

        Raises:
            PickledValueError: It contains a pickle, and `unpickle` is false.
            CheckpointError: It has a type that this version does not know.
        """
        if isinstance(value, list):
            return [self.decode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        # Scalars are what they are; only an object can carry a "$".
        if not isinstance(value, dict):
            return value
        kind = value.get("$")
        if kind is None:
            return {k: self.decode(v, f"{where}.{k}") for k, v in value.items()}
        if kind in _CONSTRUCTORS:
            return _CONSTRUCTORS[kind](self.decode(value["items"], where))
        if kind in ("tensor", "ndarray", "number"):
            # The three kinds are stored as tensors, and differ in what the user gets back.
            tensor = self._fetch(value["file"], value["key"])
            if kind == "tensor":
                return tensor
            # [()] turns an array without dims into the NumPy scalar that was stored.
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
            # Checked: the text could name anything in torch.
            dtype = getattr(torch, text, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        if kind == "device":
            return torch.device(text)
        if kind == "path":
            return Path(text)
        # Also for a dtype that this torch has not: it may come from a newer one.
        newer = "torch" if kind == "dtype" else "lightning_par"
        raise CheckpointError(
            "LP503",
            f"{where} has the type {kind!r} and a value that the installed {newer} does not know. "
            f"Install a newer {newer}.",
        )

    def _load_pickle(self, value: dict[str, Any], where: str) -> Any:
        if not self._unpickle:
            raise PickledValueError(
                "LP504",
                f"{where} is an object of the type {value['type']}, stored as a pickle. Loading a "
                "pickle could run code. If you trust the checkpoint, pass weights_only=False to "
                "fit or load_from_checkpoint.",
            )
        return pickle.loads(base64.b64decode(value["value"]))
