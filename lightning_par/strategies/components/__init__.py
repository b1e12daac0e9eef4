"""Components of a strategy: checkpoints and host offload."""
