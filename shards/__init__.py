"""Tar shards: their index, writing and reading them."""
