"""The optimizer on the host: states in memory or in files, CPU kernels."""
