"""Cats and dogs on the common training loop."""

if __name__ != "rackrun.catdog":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.catdog, not catdog")
