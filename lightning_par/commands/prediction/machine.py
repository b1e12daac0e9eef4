"""The options that all commands which predict a run have."""

from dataclasses import dataclass

from lightning_par.commands import PathName

__all__ = ["Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The options of commands that predict: what runs on what, and how to show it.

    Attributes:
        config: Configuration file of the run, as for fit.
        device: Name of a device profile (default: h100).
        profile: A file of your own with device profiles, as calibrate writes it.
        nodes: Number of nodes; default: as configured.
        devices: Devices of each node; default: as configured, else 8.
        length: Tokens of a sequence; default: of the data.
        samples: Samples of a step, all replicas; default: of the data.
        picture: Draw the pipeline, time and memory to this .png, .svg or .pdf.
        json: Print JSON, for programs.
    """

    config: PathName
    device: str | None = None
    profile: PathName | None = None
    nodes: int | None = None
    devices: int | None = None
    length: int | None = None
    samples: int | None = None
    picture: PathName | None = None
    json: bool = False
