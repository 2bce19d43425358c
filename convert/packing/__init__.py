"""From a listing of images to a finished shard folder."""
