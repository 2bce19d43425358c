"""Trackers that runs are sent to, and the file in a run folder that identifies it to each."""

from typing import Literal, get_args

TrackerName = Literal["wandb", "mlflow"]

SENT_FILES = {name: f"tracker-{name}.json" for name in get_args(TrackerName)}
"""What a tracker already has of a run; it continues the tracker's run whose id is in there."""
