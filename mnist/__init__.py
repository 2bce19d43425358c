"""Handwritten digits on the common training loop."""
