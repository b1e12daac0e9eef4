"""Estimate the memory of a run per device and host, by kind, and whether it fits."""

import argparse
import warnings

import torch

from lightning_par.commands import takes_file
from lightning_par.commands.parallel_cli import make_cli
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.memory_estimate import memory_check
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["main", "make_parser"]

_GIB = 2**30


def main(arguments: list[str]) -> int:
    """Print the estimated bytes of the fullest rank of a run, without starting it.

    Args:
        arguments: What follows ``lightning-par memory``; unknown options are passed to the parser
            of ``fit``, such as ``--trainer.strategy=zero_offload``.

    Returns:
        The exit status: 0, or 1 if the run does not fit.

    Raises:
        ConfigurationError: The strategy is not one of this package.
    """
    options, more = make_parser().parse_known_args(arguments)
    more = [f"--config={options.config}", *more]
    if options.devices is not None:
        # The devices of another machine need not exist here: a Trainer on the CPU takes any number.
        more += ["--trainer.accelerator=cpu", f"--trainer.devices={options.devices}"]
    with warnings.catch_warnings():
        # Lightning warns of arguments that are given while sys.argv has some, too.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        cli = make_cli(more, run=False)
    strategy, module = cli.trainer.strategy, cli.model
    if not isinstance(strategy, MeshStrategy):
        raise ConfigurationError(
            "LP903",
            f"trainer.strategy is {type(strategy).__name__}: what it holds is not known here. Use "
            "one of this package, such as 'zero_offload'.",
        )
    # The model may be larger than this machine.
    with torch.device("meta"):
        module.configure_model()
    check = memory_check(module, strategy)
    count = sum(p.numel() for p in module.parameters())
    print(f"{type(module).__name__}: {count:,} parameters on {strategy.sizes}")
    print("the fullest rank holds, besides activations:")
    print(check.estimate())
    misfit = check.explain_misfit(
        device=None if options.device_gib is None else int(options.device_gib * _GIB),
        host=None if options.host_gib is None else int(options.host_gib * _GIB),
    )
    if misfit is None:
        return 0
    print(misfit)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="lightning-par memory", description=__doc__)
    takes_file(parser.add_argument("--config", required=True, help="as for fit"))
    parser.add_argument("--devices", type=int, help="per node, of the machine that is to run it")
    parser.add_argument("--device-gib", type=float, help="memory of one device, to compare with")
    parser.add_argument("--host-gib", type=float, help="memory of a node, to compare with")
    return parser
