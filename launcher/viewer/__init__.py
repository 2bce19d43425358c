"""Viewers of a run: they read its folder, and ask its hosts what is left there."""
