"""One rank of a run of any size, set up and stepped without weights, devices or other ranks."""
