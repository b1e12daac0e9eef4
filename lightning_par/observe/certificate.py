"""`certificate.json`: what a run was, what was proved of it, and a hash of its weights."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

from lightning_par.errors import ConfigurationError

__all__ = ["CERTIFICATE", "Certificate", "differences", "read_certificate"]

CERTIFICATE = "certificate.json"
"""Name of the file in the directory of a run."""
_FORMAT = 1
_SAME_RUN = ("precision", "seed", "steps", "data")
"""Fields in which the same run on two meshes is equal; of the others it may have its own."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a run was, and what was proved of it.

    Attributes:
        versions: Of this package, torch, Lightning and Python.
        layout: Name -> size of every axis of the mesh.
        options: Options of the strategy.
        seed: Seed of the random numbers of all steps.
        precision: The Trainer's.
        steps: Optimizer steps.
        data: "epoch", the last one that began, from 0; and "batch", the batches taken of it.
        proofs: What was to be compared with one process -> "equal", "in part: ...",
            "not proved: ..." or "differs (code)"; empty where nothing was.
        decisions: "name", "value" and "source" of what the run decided by itself.
        weights: "parameters", their number; "sha256" and "norm" of their final values, or "note",
            why these are left out.
    """

    versions: dict[str, str]
    layout: dict[str, int]
    options: dict[str, Any]
    seed: int
    precision: str
    steps: int
    data: dict[str, int]
    proofs: dict[str, str]
    decisions: list[dict[str, str]]
    weights: dict[str, Any]

    def to_json(self) -> str:
        """Return the text of the file, which ends with a hash of all the rest."""
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**content, "hash": _hash_of(content)}, indent=2) + "\n"

    def lines(self) -> Iterator[str]:
        """Yield what the certificate says, a line for each thing."""
        yield "versions: " + _pairs(self.versions)
        yield f"layout: {_layout(self.layout)}"
        yield "options: " + _pairs({n: v for n, v in self.options.items() if v is not None})
        yield f"seed: {self.seed}; precision: {self.precision}"
        yield f"optimizer steps: {self.steps}; data: {_pairs(self.data)}"
        if not self.proofs:
            yield "proofs: none was asked for"
        yield from (f"{which}: {outcome}" for which, outcome in self.proofs.items())
        for made in self.decisions:
            source = f", {made['source']}" if made["source"] else ""
            yield f"decided: {made['name']}: {made['value']}{source}"
        yield "weights: " + _pairs(self.weights)


def read_certificate(folder: Path) -> Certificate:
    """Return the certificate of a run.

    Args:
        folder: Directory of the run, or the file itself.

    Raises:
        ConfigurationError: There is none, it lacks a field, or it was changed after the run.
    """
    path = folder / CERTIFICATE if folder.is_dir() else folder
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigurationError(
            "LP806",
            f"the file {path} does not exist. A fit that ends without an error writes its "
            "certificate.json into trainer.log_dir or, without a logger, next to its checkpoints. "
            "Pass that path.",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "LP806",
            f"the certificate {path} cannot be read: {error}. Use the file that the run wrote.",
        ) from error
    given = content if isinstance(content, dict) else {}
    # `dict[str, str]` is no class for isinstance; its origin is.
    kinds: dict[str, Any] = {each.name: each.type for each in fields(Certificate)}
    bad = [n for n, t in kinds.items() if not isinstance(given.get(n), get_origin(t) or t)]
    if bad or given.get("format") != _FORMAT:
        what = f"it has no valid {', '.join(bad)}" if bad else f"its format is not {_FORMAT}"
        raise ConfigurationError(
            "LP806",
            f"{path} is not a certificate of a run: {what}. Pass the certificate.json of a run.",
        )
    # Of all that is in the file, unknown fields included: none can be added unnoticed.
    if given.pop("hash", None) != _hash_of(given):
        raise ConfigurationError(
            "LP806",
            f"the certificate {path} was changed after the run wrote it, since its hash does not "
            "match its content. Use the file that the run wrote.",
        )
    return Certificate(**{name: given[name] for name in kinds})


def differences(one: Certificate, other: Certificate) -> tuple[list[str], list[str], bool]:
    """Compare two runs.

    Returns:
        Names of what is equal; what differs, with both values; and whether they may be the same run
        on two meshes: it has the same precision, seed, steps and data.
    """
    equal, different = list[str](), list[str]()
    for each in fields(Certificate):
        ours, theirs = getattr(one, each.name), getattr(other, each.name)
        if ours == theirs:
            equal.append(each.name)
        elif each.name == "weights":
            different.append(f"weights: {_compare_weights(ours, theirs)}")
        elif isinstance(ours, dict):
            names = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
            values = (f"{n} {ours.get(n)!s} and {theirs.get(n)!s}" for n in names)
            different.append(f"{each.name}: {'; '.join(values)}")
        elif isinstance(ours, list):
            different.append(f"{each.name}: {_texts(ours)} and {_texts(theirs)}")
        else:
            different.append(f"{each.name}: {ours} and {theirs}")
    is_same = all(getattr(one, name) == getattr(other, name) for name in _SAME_RUN)
    return equal, different, is_same


def _compare_weights(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    notes = [each["note"] for each in (ours, theirs) if "note" in each]
    if notes:
        return f"not compared: {notes[0]}"
    if ours["parameters"] != theirs["parameters"]:
        return f"{ours['parameters']:,} and {theirs['parameters']:,} parameters"
    norms = ours["norm"], theirs["norm"]
    if any(isinstance(norm, str) for norm in norms):
        return f"not bit for bit equal; their norms are {norms[0]} and {norms[1]}"
    # Never by zero, and of two zeros 0.
    apart = abs(norms[0] - norms[1]) / max(*norms, 1e-300)
    return (
        f"not bit for bit equal; their norms {norms[0]:.9g} and {norms[1]:.9g} have a relative "
        f"difference of {apart:.1e}. Sums in a different order round differently"
    )


def _hash_of(content: Mapping[str, Any]) -> str:
    # One text for one content, however the file is indented.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _layout(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"


def _texts(decisions: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{made['name']}: {made['value']}" for made in decisions) or "none"
