"""A run at Weights & Biases, or in its offline files below the run's folder (`wandb sync`)."""

import os
from pathlib import Path
from typing import Any

import wandb

from rackrun.training.track.tracker import Line, Sent, scalars

SERVER = "https://api.wandb.ai"


class WandbRun:
    """The tracker's side of a run."""

    server = ""

    def __init__(self, folder: Path, settings: dict[str, Any], sent: Sent) -> None:
        """Go on as the run that was sent before, or begin a new one.

        Without a key in the environment it stays offline: a login would ask on a terminal.
        """
        is_online = "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or settings["name"],
            name=folder.name,
            id=sent.id or None,
            resume="allow",
            dir=folder,
            config=settings,
            mode=None if is_online else "offline",
            settings=wandb.Settings(
                # Named, or the file wandb/settings in the current folder, which a host may have
                # written, could name another server: that would get the key.
                base_url=os.environ.get("WANDB_BASE_URL", SERVER),
                console="off",
                git_commit=settings["git_commit"] or None,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    def log(self, lines: list[Line]) -> None:
        """Send lines of metrics.jsonl."""
        for line in lines:
            self._run.log({**scalars(line), "step": line["step"], "epoch": line["epoch"]})

    def end(self, verdict: str, result: dict[str, float], report: Path) -> None:
        """Send the result and the report, and wait until all of it is there."""
        self._run.summary.update({"verdict": verdict, **result})
        if report.exists():
            artifact = wandb.Artifact(f"report-{self.id}", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(verdict != "finished"))
