"""Cats and dogs on the common training loop."""
