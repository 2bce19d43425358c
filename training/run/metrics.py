"""What is counted, and where the counts go: metrics.jsonl and TensorBoard.

Counts are summed first and divided last: over batches, over ranks, over an epoch, each picture has
the same weight.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from rackrun.atomic import saving, write_whole
from training.data.samples import Batch
from training.monitor.stragglers import Waiting
from training.run.folder import RunFolder

TOP5_CLASSES = 5  # with more classes than this, being among the first five counts for something


class Counts(NamedTuple):
    """Sums over pictures."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    samples: int = 0
    skipped: int = 0

    @property
    def mean_loss(self) -> float:
        """Mean over the pictures, in nats."""
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Share of pictures whose first answer was right."""
        return self.top1 / max(self.samples, 1)

    @property
    def accuracy5(self) -> float:
        """Share of pictures whose first five answers had the right one."""
        return self.top5 / max(self.samples, 1)

    def plus(self, other: "Counts") -> "Counts":
        """Counts over the pictures of both."""
        return as_counts(torch.tensor([self, other], dtype=torch.float64).sum(0))


class Counter:
    """Adds up on the device, so that no step waits for a number; `take` does."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)  # whole up to 2^53

    def add(self, sums: torch.Tensor, batch: Batch) -> None:
        """Count a batch's sums of loss, top-1 and, if there is a third one, top-5."""
        self.sums[: len(sums)] += sums
        self.sums[3] += len(batch.labels)
        if batch.skipped:
            self.sums[4] += batch.skipped

    def take(self) -> torch.Tensor:
        """The sums since the last call."""
        sums = self.sums.clone()
        self.sums.zero_()
        return sums


def as_counts(sums: torch.Tensor) -> Counts:
    """Sums as numbers of Python."""
    loss, top1, top5, samples, skipped = sums.tolist()
    return Counts(loss, int(top1), int(top5), int(samples), int(skipped))


@torch.no_grad()
def answers_right(outputs: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """How often the label is among the first so many answers."""
    best = outputs.topk(first, dim=1).indices if first > 1 else outputs.argmax(1, keepdim=True)
    return (best == labels[:, None]).any(1).sum()


def evaluation_sums(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss, top-1 and top-5 of a batch, as sums: float64 (3,)."""
    loss = cross_entropy(outputs.float(), labels, reduction="sum")
    top5 = answers_right(outputs, labels, min(5, outputs.shape[1]))
    return torch.stack([loss.double(), answers_right(outputs, labels, 1).double(), top5.double()])


class Journal:
    """Writes a run's numbers into its folder."""

    def __init__(self, folder: RunFolder, tensorboard: bool) -> None:
        self.path = folder.metrics
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder.tensorboard))

    def go_on_from(self, earlier: Path, step: int) -> None:
        """Begin with the lines of an earlier run up to this step."""
        text = earlier.read_text() if earlier.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write_whole(self.path, "".join(kept).encode())

    def train(self, step: int, epoch: float, counts: Counts, speed: float, rate: float) -> None:
        """A line about the steps since the last one."""
        self._write(
            kind="train",
            step=step,
            epoch=round(epoch, 4),
            loss=round(counts.mean_loss, 6),
            accuracy=round(counts.accuracy, 6),
            images_per_second=round(speed, 1),
            rate=rate,
        )

    def evaluate(self, step: int, epoch: float, counts: Counts, classes: int) -> None:
        """A line about an evaluation."""
        self._write(
            kind="evaluate",
            step=step,
            epoch=round(epoch, 4),
            split="val",
            loss=round(counts.mean_loss, 6),
            top1=round(counts.accuracy, 6),
            top5=round(counts.accuracy5, 6) if classes > TOP5_CLASSES else None,
            samples=counts.samples,
        )

    def waits(self, step: int, epoch: float, waiting: Waiting) -> None:
        """A line about who waited for whom, in shares of a step."""
        self._write(
            kind="waits",
            step=step,
            epoch=round(epoch, 4),
            rank=waiting.rank,
            why=waiting.why,
            waited=round(waiting.waited / waiting.step, 4),
            network=round(waiting.network / waiting.step, 4),
            link_rank=waiting.link_rank,
        )

    def close(self) -> None:
        """Bring everything to the files."""
        if self._events:
            self._events.close()

    def _write(self, **line: Any) -> None:
        with saving(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._events:
            for name in line.keys() - {
                *("kind", "step", "epoch", "split", "samples", "rank", "why", "link_rank")
            }:
                if line[name] is not None:
                    self._events.add_scalar(f"{line['kind']}/{name}", line[name], line["step"])
