"""Starts torchrun on hosts, watches it, and leaves nothing behind."""
