"""Files that one package writes and others look for."""

MANIFEST_NAME = "dataset.json"
"""The manifest, written last: a folder of shards with this file is complete."""

RETURNED = "returned"
"""The folder in a run folder with what a function returned: a file rank-N.json of each rank."""

MOST_RETURNED = 1_000_000
"""Bytes of such a file."""

LATEST = "latest"
"""The value of --resume for the newest run of a name; also its link in a folder of runs."""

PUBLISHED = "imagenet"
"""The value of --weights for published weights of the model; any other is a file or a URL."""
