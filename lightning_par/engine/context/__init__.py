"""Context parallelism: sequences sharded over the `cp` axis, by ring attention or Ulysses."""
