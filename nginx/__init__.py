"""Serves a shard folder over HTTP with nginx."""
