"""Models by name, and the weights that they begin with."""
