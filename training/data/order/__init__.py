"""The order of samples: planned once per rank and epoch, and read by parts."""
