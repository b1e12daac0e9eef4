"""The data loaders of a run: which samples a replica takes, and how many batches it has."""
