"""nginx over a folder of shards: knows HTTP servers, and nothing of tar files or tensors."""

if __name__ != "rackrun.nginx":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.nginx, not nginx")
