"""Data parallelism: FSDP2 shards, gradient reduction, and gradient compression."""
