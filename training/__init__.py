"""One training loop for every task."""

if __name__ != "rackrun.training":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.training, not training")
