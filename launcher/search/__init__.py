"""A run for each combination of settings: `--sweep`."""
