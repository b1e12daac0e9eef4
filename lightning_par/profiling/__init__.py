"""Profiling in plain torch: communication volume, timelines, FLOPs, and the reports of them."""
