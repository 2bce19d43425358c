"""A run on one page for a browser: read its folder, draw its curves, fill in a template."""
