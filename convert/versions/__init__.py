"""Versions of a finished shard folder: more images, fewer, other classes; what differs."""
