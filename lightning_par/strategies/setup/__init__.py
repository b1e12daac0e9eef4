"""Set-up: check the module, shard it, wrap its blocks."""
