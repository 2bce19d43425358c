"""Facts about hosts, gathered and checked before a run."""
