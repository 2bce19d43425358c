"""Turns raw data sets into folders of shards."""
