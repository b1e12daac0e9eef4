"""Deferred initialization: a model built on the meta device, materialized shard by shard."""
