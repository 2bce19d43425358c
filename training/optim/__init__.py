"""Optimizers and weight averaging."""
