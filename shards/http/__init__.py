"""Shards from an HTTP server."""
