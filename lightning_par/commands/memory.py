"""The command that estimates memory."""

from lightning_par.commands import FitArguments, PathName, quick_imports

__all__ = ["memory"]


def memory(
    *,
    config: PathName,
    devices: int | None = None,
    device_gib: float | None = None,
    host_gib: float | None = None,
    fit: FitArguments,
) -> int:
    """Estimate the memory of a run per device and host, by kind, and whether it fits.

    Shows the fullest rank, and starts nothing. Exits with status 1 if the run does not fit.

    Args:
        config: Configuration file of the run, as for fit.
        devices: Devices of each node of the machine that is to run it; default: as configured.
        device_gib: Memory of one device, to compare with.
        host_gib: Memory of a node, to compare with.
        fit: More arguments of fit, such as ``--trainer.strategy=zero_offload``.

    Raises:
        ConfigurationError: The strategy is not one of this package.
    """
    with quick_imports():
        from lightning_par.commands.prediction.run_config import configure
        from lightning_par.strategies.memory_estimate import memory_check

    more = [f"--config={config}", *fit]
    if devices is not None:
        more.append(f"--trainer.devices={devices}")
    # On meta, as the model may be larger than this machine.
    run = configure(more, on_meta=True, on_cpu=True)
    strategy, module = run.strategy, run.model
    run.build_model()
    run.take_inferred_plan()
    check = memory_check(module, strategy)
    count = sum(p.numel() for p in module.parameters())
    print(f"{type(module).__name__}: {count:,} parameters on {strategy.sizes}")
    print("the fullest rank holds, besides activations:")
    print(check.estimate())
    misfit = check.explain_misfit(
        device=None if device_gib is None else int(device_gib * 2**30),
        host=None if host_gib is None else int(host_gib * 2**30),
    )
    if misfit is None:
        return 0
    print(misfit)
    return 1
