"""A zoo of silent faults of parallel training, and a score of checkers; see README.md."""
