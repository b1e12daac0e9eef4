"""Expert parallelism: experts sharded over the `ep` axis."""
