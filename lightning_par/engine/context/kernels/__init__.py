"""Attention kernels that return the log-sum-exp which merging partial results needs."""
