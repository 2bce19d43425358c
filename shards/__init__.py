"""Tar shards: their index, how they are written, and how their bytes come back."""
