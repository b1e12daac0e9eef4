"""One step: the batch, the loss, the logs and their weights."""
