"""Which samples a run trains on, how they are read, and how their images are changed."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from rackrun.commandline.options import Values
from rackrun.commandline.ranges import Between, Count, Positive
from rackrun.commands import called
from rackrun.data_location import are_plain_tars, parts_of, refuse_passwords
from rackrun.errors import UsageError
from rackrun.terminal import one_line
from rackrun.training.settings import Slice, option

OF_ONE_DATA_SET = ("catdog", "imagenet", "mnist")
"""Tasks whose raw data `rackrun convert` knows by the same name."""
POLICIES = ("trivial_augment", "rand_augment")
SELECTION = ("only_classes", "class_weights", "max_train_samples")
"""Settings that choose samples, or have some come more often than others."""

ONLY_EXACT = ("global_batch", *SELECTION)
"""Settings that resampled reading does not have."""

CropArea = Annotated[float, Between(0.001, 1)]
"""The smallest part of an image's area that a random crop keeps."""


@dataclass(frozen=True)
class DataSettings(Slice):
    """Data and batches."""

    data: Annotated[str, Values("FOLDER|URL")] = ""
    """Folder or URL of the shards, which `rackrun convert` makes; in exact epochs also several with
    the same classes: --data A --data B. Or tars without an index, in webdataset's form:
    's-{000..127}.tar', a::b, https://..., 'pipe:COMMAND'."""
    cache: Annotated[str, Values("FOLDER")] = ""
    """Folder on each host, on a disk or in /dev/shm, that keeps whole shards of --data; they are
    fetched while the run trains."""
    cache_size: Annotated[float, Between(0, description="0 or more")] = 0.0
    """Size limit of --cache in GB on each host; 0: leave a tenth of its disk free. The data set
    that was unused for longest is removed first."""
    prefetch: bool = False
    """Fill the caches of all hosts before the first step."""
    synthetic: bool = False
    """Train on fixed random images instead of data, to measure speed."""
    batch_size: Positive = 64
    """Images per step on each rank."""
    epochs: Positive = 10
    """Passes over the training set."""
    steps_per_epoch: Count = 0
    """With --resampled: steps per epoch; 0: as many as the training set fills."""
    epoch_samples: Count = 0
    """With --resampled: images per epoch over all ranks; 0: as many as the training set has.
    Required for tars without an index."""
    classes: Annotated[str, Values("FILE")] = ""
    """For tars without an index: file with the names of the classes, one per line."""
    num_classes: Count = 0
    """For tars without an index: number of classes, instead of --classes."""
    label_field: Annotated[str, Values("NAME")] = "label"
    """For tars without an index: field of the .json that holds the class, if there is no .cls."""
    eval_data: Annotated[str, Values("TARS")] = ""
    """For tars without an index: tars to evaluate on; each image is used once."""
    exact_epochs: bool = True
    """Use every sample exactly once per epoch, on any number of ranks; --resampled: draw shards
    with replacement, and read each as a stream."""
    global_batch: Count = 0
    """Images per step over all ranks; 0: --batch-size on each rank. A resumed run keeps its number
    on any number of ranks; fewer ranks compute a step in several parts."""
    balance: Literal["even", "auto"] = "even"
    """How the images of a step are split among ranks: evenly, or by their measured speed (auto)."""
    only_classes: Annotated[str, Values("CLASSES")] = ""
    """Train only on these classes, by name or number: cat,dog."""
    class_weights: Annotated[str, Values("WEIGHTS")] = ""
    """How often each sample of a class is used per epoch: cat=2,dog=0.5; `balanced`: all classes
    equally often."""
    max_train_samples: Count = 0
    """Use only the first training samples, this many; 0: all."""
    aug_repeats: Positive = 1
    """Augmented copies of each image in a step (repeated augmentation); each image is then used in
    one of that many epochs."""
    shuffle_buffer: Positive = 1000
    """With --resampled: images in the shuffle buffer of each worker."""
    workers: Annotated[int, Between(-1, 256)] = -1
    """Processes per rank that read and decode; -1: by the number of cores; 0: none."""
    seed: Annotated[int, Between(0, 2**63 - 1, "between 0 and 2^63 - 1")] = 0
    """Seed of all random numbers."""
    eval_split: Annotated[str, Values("NAME")] = "val"
    """Split of the data set to evaluate: val or test."""
    eval_flip: bool = False
    """Evaluate the mean of the outputs for each image and its mirror image."""
    bad_samples: Literal["fail", "quarantine"] = "fail"
    """fail: end the run at a damaged image; quarantine: leave such images out and count them."""
    bad_samples_limit: Positive = 100
    """With `quarantine`: images that each rank may leave out; one more ends the run."""

    @property
    def judged_by(self) -> str:
        """The name of the evaluated split in messages."""
        return "validation" if self.eval_split == "val" else self.eval_split

    @property
    def chooses(self) -> bool:
        """Whether only some samples are trained on, or some more often than others."""
        return any(getattr(self, name) for name in SELECTION)

    def problems(self) -> list[str]:
        """Refuse what asks for two orders of the samples, or two ways to read them."""
        problems = super().problems()
        if self.synthetic and self.data:
            problems.append("--synthetic and --data exclude each other: leave one of them out")
        if self.synthetic:
            return problems
        lengths = [option(n) for n in ("steps_per_epoch", "epoch_samples") if getattr(self, n)]
        if lengths and self.exact_epochs and not are_plain_tars(self.data):
            problems.append(
                f"exact epochs have as many steps as samples fill: leave out {lengths[0]}, or"
                " type --resampled"
            )
        elif len(lengths) > 1:
            problems.append(f"{' and '.join(lengths)} exclude each other: leave one of them out")
        if self.num_classes and self.classes:
            problems.append("--classes and --num-classes exclude each other: leave one of them out")
        if not self.exact_epochs:
            options = [option(name) for name in ONLY_EXACT if getattr(self, name)]
            options += ["--aug-repeats"] * (self.aug_repeats > 1)
            options += ["--balance auto"] * (self.balance == "auto")
            if len(parts_of(self.data)) > 1 and not are_plain_tars(self.data):
                options.append("several folders in --data")
            if options:
                problems.append(f"{', '.join(options)}: only with --exact-epochs, which is not on")
        return problems

    def require_data(self, task: str) -> None:
        """Raise UsageError for settings that name no data; `task` is for the message."""
        if self.synthetic:
            return
        refuse_passwords(self.data)
        refuse_passwords(self.eval_data)
        if are_plain_tars(self.data):
            self._require_plain()
        locations = parts_of(self.data)
        if len(set(locations)) < len(locations):
            raise UsageError(f"--data {one_line(self.data)[:80]}: a part of it is named twice")
        if not locations:
            what = "with a folder of images for each class, or shards"
            if task in OF_ONE_DATA_SET:
                what = f"made by `{called('convert')} {task} IMAGES FOLDER`"
            raise UsageError(f"no data: type --data FOLDER|URL, {what}; --synthetic measures speed")

    def _require_plain(self) -> None:
        shown = one_line(self.data)[:80]
        if self.exact_epochs:
            raise UsageError(
                f"--data {shown}: tars without an index, and exact epochs need one: type"
                f" --resampled, or make one with `{called('convert')} index`"
            )
        needed = []
        if not self.epoch_samples:
            needed.append("--epoch-samples N, the images that make an epoch")
        if not (self.classes or self.num_classes):
            needed.append("--classes FILE with their names, or --num-classes N")
        if needed:
            raise UsageError(
                f"--data {shown}: tars without an index say neither how many images nor which"
                f" classes there are: type {'; and '.join(needed)}"
            )
        if self.eval_data and not are_plain_tars(self.eval_data):
            raise UsageError(f"--eval-data {one_line(self.eval_data)[:80]}: not the names of tars")


@dataclass(frozen=True)
class ImageSettings(Slice):
    """Images as the model sees them: size, normalization, augmentation."""

    image_size: Annotated[int, Between(8, 4096, "between 8 and 4096 pixels")] = 224
    """Side of the square that the model sees, in pixels."""
    mean: Annotated[str, Values("NUMBERS")] = ""
    """Mean to subtract from pixels between 0 and 1, a number for each channel or for all:
    0.5,0.5,0.5; '': that of the model's published weights, or else ImageNet's."""
    std: Annotated[str, Values("NUMBERS")] = ""
    """Standard deviation to divide pixels by after that; with --mean."""
    flip: bool = True
    """Mirror half of the training images; --no-flip for digits, letters and signs."""
    vertical_flip: bool = False
    """Turn half of the training images upside down: for aerial images or cells."""
    color_jitter: Annotated[float, Between(0, 1)] = 0.0
    """Change brightness, contrast and saturation of training images by up to this fraction."""
    trivial_augment: bool = False
    """Apply one operation of random strength to each training image (TrivialAugment)."""
    rand_augment: Annotated[int, Between(0, 30)] = 0
    """Apply two operations of this strength, 1 to 30, to each training image (RandAugment); 0:
    none."""
    random_erasing: Annotated[float, Between(0, 1)] = 0.0
    """Fraction of training images in which a rectangle is covered with the mean color."""

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and deviation as typed, a number for each channel or for all; None: not typed."""
        if not self.mean:
            return None
        return _channel_values(self.mean), _channel_values(self.std)

    def _normalization_problems(self) -> Iterator[str]:
        if bool(self.mean) != bool(self.std):
            yield "--mean and --std go together: type both"
        for name, text, least in (("--mean", self.mean, 0.0), ("--std", self.std, 1e-6)):
            values = _channel_values(text)
            if not text or (len(values) in (1, 3) and all(least <= each <= 1 for each in values)):
                continue
            scale = ", on a scale from 0 to 1: divide by 255" if max(values, default=0) > 1 else ""
            yield f"{name} {text}: type a number for each channel, as in 0.5,0.5,0.5{scale}"

    def problems(self) -> list[str]:
        """Refuse several policies at once, and numbers that are no mean or deviation."""
        problems = [*super().problems(), *self._normalization_problems()]
        policies = [option(name) for name in POLICIES if getattr(self, name)]
        if len(policies) > 1:
            problems.append(f"{' and '.join(policies)} exclude each other: leave one of them out")
        return problems


def _channel_values(text: str) -> tuple[float, ...]:
    with suppress(ValueError):
        return tuple(float(part) for part in text.split(","))
    return ()
