"""Readers of raw data: folders, archives, tables."""
