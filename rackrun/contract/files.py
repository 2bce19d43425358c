"""Files that one package writes and others look for."""

from typing import Literal, get_args

MANIFEST_NAME = "dataset.json"
"""The manifest, written last: a folder of shards with this file is complete."""

LARGEST_MANIFEST = 64 << 20
"""Bytes of a manifest that is read: 22,000 classes and 100,000 shards take 20 MB."""

RETURNED = "returned"
"""The folder in a run folder with what a function returned: a file rank-N.json of each rank."""

MOST_RETURNED = 1_000_000
"""Bytes of such a file."""

LATEST = "latest"
"""The newest run; of --resume, the newest of a name. Also the link in a folder of runs."""

PUBLISHED = "imagenet"
"""The value of --weights for published weights of the model; any other is a file or a URL."""

TrackerName = Literal["wandb", "mlflow"]
"""The trackers that runs are sent to."""

SENT_FILES = {name: f"tracker-{name}.json" for name in get_args(TrackerName)}
"""What a tracker already has of a run; it continues the tracker's run whose id is in there."""
