"""Files that one package writes and others look for."""

MANIFEST_NAME = "dataset.json"
"""The manifest, written last: a folder of shards with this file is complete."""

RETURNED = "returned"
"""The folder in a run folder with what a function returned: a file rank-N.json of each rank."""

MOST_RETURNED = 1_000_000
"""Bytes of such a file."""

LATEST = "latest"
"""The newest run; of --resume, the newest of a name. Also the link in a folder of runs."""

ATTACHED = ".attached"
"""The file in the copy of a detached run's folder that names the run."""

PUBLISHED = "imagenet"
"""The value of --weights for published weights of the model; any other is a file or a URL."""
