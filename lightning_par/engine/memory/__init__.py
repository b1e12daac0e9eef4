"""What a rank holds: estimated before a run, placed by parameter, measured in a run."""
