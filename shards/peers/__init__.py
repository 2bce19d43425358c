"""Blocks of the node cache from other hosts of the run."""
