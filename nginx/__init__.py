"""nginx over a folder of shards: knows HTTP servers, and nothing of tar files or tensors."""
