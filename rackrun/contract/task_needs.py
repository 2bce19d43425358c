"""What a task's settings need of the machines that run them, as its check reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskNeeds:
    """What is refused before a run starts, on machines that the check itself cannot see."""

    packages: tuple[str, ...] = ()
    """Packages that must be installed where ranks run."""
    trackers: tuple[str, ...] = ()
    """Packages that must be installed where rank 0 runs."""
    modules: tuple[str, ...] = ()
    """Modules of the user's own parts that are not in the folder of the launch, likewise."""
    weights: str = ""
    """A file that every host needs."""
    cache: str = ""
    """A folder that every host writes to, and makes if need be."""
    splits: tuple[str, ...] = ()
    """Splits in which the data must have samples."""
    batch_size: int = 1
    resume: str = ""
    """The run to be continued, as typed."""
    step_images: int = 0
    """The images of each of its steps, over all ranks; 0: any number, or not known."""
    most_ranks: int = 0
    """0: any number of ranks will do."""
    why_not_more: str = ""
    own_options: tuple[str, ...] = ()
    """The options that the task adds to those of all tasks, without dashes."""
    keeps_ranks: bool = False
    """It cannot be continued on fewer ranks: each adds its images to a step."""

    @property
    def imports(self) -> tuple[str, ...]:
        """Return what the interpreter of a host is asked for."""
        return (*self.packages, *self.trackers, *self.modules)

    def rank_problem(self, ranks: int) -> str:
        """Return why a number of ranks cannot run the task, and what to type; empty if it can."""
        images, previous = ranks * self.batch_size, self.step_images
        if previous and images != previous:
            text = (
                f"--resume {self.resume}: not a run to resume: {images} images per step here,"
                f" {previous} in the checkpoint"
            )
            if previous % ranks == 0:
                return f"{text}; with as many ranks as here type --batch-size {previous // ranks}"
            return f"{text}; start as many ranks as before"
        if self.most_ranks and ranks > self.most_ranks:
            return f"{ranks} ranks: {self.why_not_more}"
        return ""
