"""Handwritten digits on the common training loop."""

if __name__ != "rackrun.mnist":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.mnist, not mnist")
