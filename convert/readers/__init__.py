"""Readers of raw data: archives, folders, MAT-files."""
