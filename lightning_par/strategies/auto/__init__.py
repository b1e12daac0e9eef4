"""The strategy that chooses its own layout: what it looks at, the choice, and the check of it."""
