"""The mechanisms of parallel training in plain torch; nothing here imports Lightning."""
