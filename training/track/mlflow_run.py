"""A run of MLflow: at MLFLOW_TRACKING_URI, or in files below the run's folder."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it, the files are refused

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT

from rackrun.training.track.tracker import Line, Sent, scalars

MOST_METRICS, MOST_PARAMS, MOST_TEXT = 1000, 100, 500  # of a request; characters of a value
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """The tracker's side of a run."""

    def __init__(self, folder: Path, settings: dict[str, Any], sent: Sent) -> None:
        """Go on as the run that this server has already, or begin a new one.

        Without a server, its files are a run of their own.
        """
        self.server = os.environ.get("MLFLOW_TRACKING_URI", "")
        location = self.server or (folder / "mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=location)
        self.id = self._kept(sent) or self._begun(folder.name, settings)
        self._client.update_run(self.id, status="RUNNING")

    def _kept(self, sent: Sent) -> str:
        if not sent.id or sent.server != self.server:
            return ""
        with suppress(MlflowException):  # not there: files of another run's folder have it
            return str(self._client.get_run(sent.id).info.run_id)
        return ""

    def _begun(self, name: str, settings: dict[str, Any]) -> str:
        client, project = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or settings["name"]
        existing = client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else client.create_experiment(project)
        run = client.create_run(experiment, run_name=name).info.run_id
        tags = {MLFLOW_GIT_COMMIT: settings["git_commit"], "rackrun.run_id": settings["run_id"]}
        client.log_batch(run, tags=[RunTag(tag, value) for tag, value in tags.items() if value])
        params = [Param(key, value[:MOST_TEXT]) for key, value in flat(settings)]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(run, params=params[start : start + MOST_PARAMS])
        return str(run)

    def log(self, lines: list[Line]) -> None:
        """Send lines of metrics.jsonl."""
        metrics = [
            Metric(name, value, round(line["time"] * 1000), line["step"])
            for line in lines
            for name, value in scalars(line).items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[start : start + MOST_METRICS])

    def end(self, verdict: str, result: dict[str, float], report: Path) -> None:
        """Send the result and the report, and end the run."""
        for name, value in result.items():
            self._client.log_metric(self.id, name, value)
        if report.exists():
            self._client.log_artifact(self.id, str(report))
        self._client.set_terminated(self.id, STATUS[verdict])


def flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings as parameters, those of a table with its name and a dot before theirs."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        else:
            # A version is under the name of its folder, `data@2`, and MLflow refuses an @.
            yield re.sub(r"[^\w\-. :/]", "_", f"{above}{name}"), str(value)
