"""Device profiles: what a device, the links of a node and the network can do, by datasheet.

The shipped profiles lie in ``profiles.json``; a user's own file has the same format: an object
with ``devices`` and, optionally, ``networks``, where every number has a ``..._source`` beside it.
Names that a user's file does not define are those of the shipped one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_par.errors import ConfigurationError, nearest, raise_problems
from lightning_par.planner.constants import Calibration, Constants, fitted_constants
from lightning_par.planner.shapes import Implementation

__all__ = ["DeviceProfile", "device_names", "implementation", "load_profile", "reached"]

_SHIPPED = Path(__file__).with_name("profiles.json")
_NUMBERS = ("flops", "processors", "bandwidth", "memory")
"""What every device has to give; ``fp8_flops`` may be null, ``node`` is 8 unless it is given."""
_OPTIONAL = ("fp8_flops", "node", "host_link")


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What one device can do; datasheet numbers, nothing fitted.

    Attributes:
        name: As in the file.
        flops: Dense 16-bit matrix products, FLOP/s.
        fp8_flops: Dense 8-bit matrix products, FLOP/s; 0: it has none.
        processors: Streaming multiprocessors: matrix products run in waves of so many tiles.
        bandwidth: Of the device's memory, bytes/s.
        memory: Of the device, bytes.
        link: To a device of the same node, bytes/s in one direction.
        network: To another node, bytes/s in one direction; of one device, a node has `node` times.
        host_link: To the memory of the host, bytes/s in one direction.
        node: Devices that share the fast links.
        accelerator: The Trainer's name of its kind; "auto" where the file does not say.
        calibration: What was measured on the machine; None: nothing was.
    """

    name: str
    flops: float
    fp8_flops: float = 0.0
    processors: int
    bandwidth: float
    memory: float
    link: float
    network: float
    host_link: float = 25e9
    node: int = 8
    accelerator: str = "auto"
    calibration: Calibration | None = None

    @property
    def runs_eagerly(self) -> bool:
        """Whether every operator reads and writes its tensors by itself; else some are fused."""
        return self.calibration is not None and self.calibration.eager > 0


def load_profile(name: str, path: str | Path | None = None) -> DeviceProfile:
    """Return a device's profile by name.

    Args:
        name: Such as ``"h100"``; see `device_names`.
        path: A file of the user's own, searched first.

    Raises:
        ConfigurationError: The file cannot be read or lacks a number or its source, with every
            problem; or no device has that name.
    """
    devices, networks = _merged(path)
    if name not in devices:
        raise ConfigurationError(
            "LP908",
            f"there is no profile of the device {name!r}{_alike(name, devices)} The devices with "
            f"a profile are {', '.join(sorted(devices))}. To make a profile of another device, "
            "run lightning-par calibrate on it.",
        )
    entry = devices[name]
    raise_problems(ConfigurationError, "LP908", list(_problems(name, entry, networks)))
    given = {key: entry[key] for key in (*_NUMBERS, *_OPTIONAL) if entry.get(key) is not None}
    link, network = (float(networks[entry[key]]["bandwidth"]) for key in ("link", "network"))
    return DeviceProfile(
        name=name,
        link=link,
        network=network,
        accelerator=str(entry.get("accelerator", "auto")),
        calibration=_calibration(name, entry.get("calibration")),
        **given,
    )


def _alike(name: str, devices: Mapping[str, Any]) -> str:
    """Return the end of a message that suggests devices, not merely names with the same letters."""
    kinds = [one for one in sorted(devices) if one.startswith(f"{name.lower()}-")]
    if kinds:
        return f"; did you mean {' or '.join(map(repr, kinds))}?"
    return nearest(name.lower(), devices, cutoff=0.8)


def reached(device: DeviceProfile) -> Constants:
    """Return what is reached of a device's numbers: as measured, else as fitted on its family."""
    return device.calibration.constants if device.calibration else fitted_constants(device.name)


def implementation(precision: str, device: DeviceProfile) -> Implementation:
    """Return what Adam holds and sends per parameter under a precision of the Trainer.

    Args:
        precision: Such as ``"bf16-mixed"``.
        device: What was measured on it holds for messages and attention.
    """
    code = _held(precision)
    if device.calibration is None:
        return code
    rates, overlaps = device.calibration.attention_rates, device.calibration.overlaps
    return replace(code, attention_rates=rates, overlap_data=overlaps, async_p2p=overlaps)


def _held(precision: str) -> Implementation:
    if precision in ("bf16-true", "16-true"):
        # Weights, gradients and two moments in 16 bits; no float32 copy.
        return Implementation(gradient_bytes=2, state_bytes=4, reduce_bytes=2, step_traffic=14)
    # Parameters and gradients in float32, also where products are in 16 bits; or all in float64.
    word = 8 if precision == "64-true" else 4
    products = 2 if "mixed" in precision else word
    return Implementation(
        activation_bytes=products,
        autocast="mixed" in precision,
        weight_bytes=word,
        gradient_bytes=word,
        state_bytes=2 * word,
        reduce_bytes=word,
        gather_bytes=word,
        step_traffic=7 * word,
    )


def device_names(path: str | Path | None = None) -> list[str]:
    """Return the names of all devices that have a profile, sorted.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    return sorted(_merged(path)[0])


def _merged(path: str | Path | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    devices, networks = {}, {}
    # The user's names come last, and win.
    for file in (_SHIPPED, *([Path(path)] if path else [])):
        content = _read(file)
        devices.update(content["devices"])
        networks.update(content.get("networks", {}))
    return devices, networks


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "LP908",
            f"the device profile {path} cannot be read: {error}. Make one with `lightning-par "
            "calibrate --out FILE`.",
        ) from error
    found = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ConfigurationError(
            "LP908",
            f"the profile {path} has no valid entry 'devices', a JSON object that maps the name "
            "of each device to an object with its numbers. Make a profile with `lightning-par "
            "calibrate --out FILE`.",
        )
    return dict(content)


def _calibration(name: str, entry: Any) -> Calibration | None:
    """Return what ``lightning-par calibrate`` wrote."""
    if entry is None:
        return None
    numbers = {field.name for field in fields(Constants)}
    try:
        constants = {key: float(value) for key, value in entry["constants"].items()}
        # Older profiles have one wait for all groups; what stages wait for is in `waits`.
        constants.setdefault("network_part_wait", constants["network_wait"])
        stage_start = constants.pop("stage_start", 0.0)
        forward, backward = map(float, entry["attention_rates"])
        slowdown = tuple(map(float, entry["slowdown"]))
        every = (*constants.values(), forward, backward, *slowdown)
        overlaps = entry["overlaps"]
        waits = tuple(map(float, entry.get("waits", ())))
        eager = float(entry.get("eager", 0.0))
        exchange = tuple(map(float, entry.get("exchange", ())))
        collectives = {
            kind: tuple((float(start), float(rate)) for start, rate in lines)
            for kind, lines in entry.get("collectives", {}).items()
        }
        if min((eager, *exchange, stage_start)) < 0:
            raise ValueError("no time and no rate can be less than 0")
        if any(wait < -_shortest_start(collectives, k) for k, wait in enumerate(waits)):
            raise ValueError("a number in `waits` gives a collective a negative time")
        if set(constants) != numbers - {"stage_start"} or not slowdown or min(every) <= 0:
            raise ValueError("a number is missing, unknown or not positive")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "LP908",
            f"the calibration of the device {name} cannot be read ({error}). Write it again with "
            "lightning-par calibrate.",
        ) from error
    return Calibration(
        constants=Constants(**constants, stage_start=stage_start),
        attention_rates=(forward, backward),
        slowdown=slowdown,
        overlaps=bool(overlaps),
        waits=waits,
        eager=eager,
        exchange=exchange,
        collectives=collectives,
    )


def _shortest_start(
    collectives: Mapping[str, tuple[tuple[float, float], ...]], place: int
) -> float:
    """Return the shortest start of a collective while so many ranks and one more are at work."""
    lines = [line for kind, line in collectives.items() if kind != "message"]
    return min((line[min(place, len(line) - 1)][0] for line in lines), default=0.0)


def _problems(name: str, entry: Mapping[str, Any], networks: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for every number that is missing, not positive or without a source."""
    # A number without a source could be anybody's guess.
    for key in (*_NUMBERS, *(k for k in _OPTIONAL if entry.get(k) is not None)):
        value = entry.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            yield f"device {name}: {key}={value!r} must be a number greater than 0."
        elif not entry.get(f"{key}_source"):
            yield (
                f"device {name}: {key}={value!r} has no {key}_source. Add it: a text that says "
                "where the number is from."
            )
    for key in ("link", "network"):
        network = networks.get(entry.get(key, ""), {})
        if not network:
            near = nearest(entry.get(key), networks, otherwise="; name one of them.")
            yield f"device {name}: {key}={entry.get(key)!r} is not one of the 'networks'{near}"
        elif not network.get("bandwidth", 0) > 0 or not network.get("source"):
            yield f"network {entry[key]} needs a bandwidth greater than 0 and a source."
    known = {*_NUMBERS, *_OPTIONAL, "link", "network", "accelerator", "note", "calibration"}
    for key in entry:
        if key.removesuffix("_source") not in known:
            yield f"device {name}: {key!r} is unknown{nearest(key, known)}"
