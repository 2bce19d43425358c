"""Turns raw data sets into folders of shards."""

if __name__ != "rackrun.convert":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.convert, not convert")
