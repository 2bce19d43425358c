"""ImageNet on the common training loop."""

if __name__ != "rackrun.imagenet":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.imagenet, not imagenet")
