"""Asynchronous data parallelism: islands of ranks that meet at a server every few steps."""
