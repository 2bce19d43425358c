"""Files that one package writes and others look for."""

MANIFEST_NAME = "dataset.json"
"""Written last into a folder of shards: one that has it is complete."""

RETURNED = "returned"
"""The folder in a run folder with what a function returned: a file rank-N.json of each rank."""

MOST_RETURNED = 1_000_000
"""Bytes of such a file."""

LATEST = "latest"
"""To --resume: the newest run of the same folder and name; in a folder: the link to its newest."""

PUBLISHED = "imagenet"
"""To --weights: the best that torchvision has for the model; no file, as other words without ://."""
