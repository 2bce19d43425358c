"""A run from preflight to its result: attempts, restarts, serving data."""
