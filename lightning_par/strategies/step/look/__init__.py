"""The look at a step before it runs: on a few samples and on parts of them, without a trace."""
