"""The command that measures a machine for predictions."""

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TYPE_CHECKING

from lightning_par.commands import PathName, quick_imports
from lightning_par.errors import ConfigurationError
from lightning_par.planner.constants import Constants

if TYPE_CHECKING:
    from lightning_par.profiling.calibration import Measures

__all__ = ["as_profile", "calibrate"]


def calibrate(
    *,
    out: PathName,
    name: str = "here",
    accelerator: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    seconds: float = 0.04,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> None:
    """Measure this machine, and write a device profile that search, forecast and the like take.

    Starts ranks as ``lightning-par fit`` does: on one machine by itself, on many by their scheduler
    or torchrun. Run it while the machine does nothing else.

    Args:
        out: JSON file; other devices in it are kept.
        name: Name of the device.
        accelerator: As for fit.
        devices: Devices of each node.
        nodes: Number of nodes.
        seconds: Seconds of a timed round, of which there are some 300.
        dtype: Type of products and messages; auto: bfloat16, on a CPU float32.

    Raises:
        ConfigurationError: The file's folder does not exist, or the file holds something else.
    """
    path = Path(out)
    content = _content(path)
    with quick_imports():
        import lightning.pytorch as pl
        import torch
        from torch.utils.data import DataLoader

        from lightning_par.commands.prediction.measurement import Measurement

    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Measurement(dtype, seconds)
    trainer.predict(module, DataLoader([0]), return_predictions=False)  # type: ignore[arg-type]
    if trainer.is_global_zero:
        source = (
            f"lightning-par calibrate, {nodes} x {devices} ranks, {module.kind}, "
            f"torch {torch.__version__}, {platform.machine()}"
        )
        entry, networks = as_profile(name, module.found, local=devices, source=source)
        content["devices"][name] = {"accelerator": trainer.accelerator.name(), **entry}
        content["networks"] |= networks
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(_report(module.found))
        print(f"written: {path}; use it as --profile {path} --device {name}")


def as_profile(
    name: str, found: "Measures", *, local: int, source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entry of a device and those of its networks, as `load_profile` reads them.

    Args:
        name: Of the device.
        found: What was measured.
        local: Devices of a node.
        source: Where the numbers are from, in words.
    """
    link = found.link or found.network
    network = found.network or found.link
    numbers = {
        "flops": found.flops,
        "processors": found.processors,
        "bandwidth": found.bandwidth,
        "memory": found.memory,
        "host_link": found.host_link,
        "node": local,
    }
    entry: dict[str, Any] = {}
    for key, value in numbers.items():
        entry |= {key: value, f"{key}_source": source}
    # The rates are measured as they are reached: nothing is left to multiply them by.
    reached = Constants(
        product=1.0,
        product_fp8=1.0,
        memory=found.elementwise,
        link=1.0,
        network=1.0,
        network_joint=1.0,
        network_part=1.0,
        host=found.host,
        kernel=found.kernel,
        inner_half=found.inner_half,
    )
    networks = {}
    if link and network:
        networks[f"{name}-link"] = {"bandwidth": link.rate, "source": source}
        networks[f"{name}-network"] = {"bandwidth": network.rate, "source": source}
        entry |= {"link": f"{name}-link", "network": f"{name}-network"}
        reached = replace(reached, link_start=link.start, network_start=network.start)
    else:
        # Nothing to measure: a search over more devices takes those of a datasheet.
        entry |= {"link": "pcie4", "network": "hdr-200", "note": "links were not measured"}
    entry["calibration"] = {
        "constants": asdict(reached),
        "attention_rates": list(found.attention),
        "slowdown": list(found.slowdown),
        "waits": list(found.waits),
        "exchange": list(found.exchange),
        "eager": found.eager,
        "collectives": {kind: list(map(list, lines)) for kind, lines in found.collectives.items()},
        "overlaps": found.overlaps,
    }
    return entry, networks


def _content(path: Path) -> dict[str, Any]:
    """Return what the file holds, or an empty profile."""
    if not path.parent.is_dir():
        raise ConfigurationError(
            "LP905",
            f"--out {path} cannot be written, since the folder {path.parent} does not exist. "
            "Create it.",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {
            "devices": dict(content.get("devices", {})),
            "networks": dict(content.get("networks", {})),
        }
    except (AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            "LP905",
            f"--out {path} exists already, but is no file of device profiles ({error}). Use "
            "another file name.",
        ) from error


def _report(found: "Measures") -> str:
    forward, backward = found.attention
    slowdown = ", ".join(f"{factor:.2f}" for factor in found.slowdown)
    rows = {
        "products": f"{found.flops / 1e9:.4g} GFLOP/s, half of it at an inner length of "
        f"{found.inner_half:.3g}",
        "memory": f"{found.bandwidth / 1e9:.4g} GB/s, of which norms, sums and activations reach "
        f"{found.elementwise:.0%}",
        "operators": f"{found.eager / 1e9:.4g} GB/s, where each runs by itself",
        "attention": f"{forward:.0%} and {backward:.0%} of products, forward and backward",
        "a kernel": f"{found.kernel * 1e6:.3g} us, of the host {found.host * 1e6:.3g} us",
        "slowdown": f"{slowdown}, with 1 to {len(found.slowdown)} devices of a node at work",
    }
    if not found.eager:
        del rows["operators"]
    if any(found.waits):
        waits = ", ".join(f"{1e3 * wait:.3g}" for wait in found.waits)
        rows["waits"] = f"{waits} ms that a collective takes longer, while so many compute"
    for name, link in (("inside a node", found.link), ("between nodes", found.network)):
        if link:
            rows[name] = (
                f"{link.rate / 1e9:.4g} GB/s after {link.start * 1e6:.3g} us; off by "
                f"{link.error:.0%} in the mean"
            )
    return "\n".join(f"{name:<15}{value}" for name, value in rows.items())
