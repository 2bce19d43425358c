"""The images that a data set was made of, found by their digests, to compare tiled ones with."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from convert.images.tiles import has_sound_tiles, same_coefficients
from convert.images.transcoder import Refused
from convert.progress import Progress, meter
from convert.readers.archives import open_images
from convert.readers.records import Container, Defect, Record, is_image
from rackrun.errors import DataError
from shards.jpeg import jpeg_frame
from shards.tiles import original_digest
from shards.verify import Sample


@dataclass(frozen=True)
class Originals:
    """A source, and its images by SHA-256."""

    container: Container
    records: dict[bytes, Record]

    @classmethod
    def of(cls, source: Path) -> "Originals":
        """Read a folder, a zip, or a tar (also of tars) once; UsageError for anything else."""
        container = open_images(source, "--source")
        by_digest: dict[bytes, Record] = {}
        images = [record for record in container.records() if is_image(record.name)]
        with meter("read", len(images)) as shown:
            for record in images:
                try:
                    by_digest[sha256(container.read(record)).digest()] = record
                except Defect:
                    continue  # no data set has it
                finally:
                    shown.advance(Progress(1, record.size))
        return cls(container, by_digest)

    def check(self, tiled: bytes, digest: bytes, where: str) -> bool:
        """Return False if the original of an image is not here.

        DataError, which names `where`, if it is and the image has other coefficients.
        """
        record = self.records.get(digest)
        if record is None:
            return False
        try:
            equal = same_coefficients(tiled, self.container.read(record))
        except (Refused, Defect) as error:
            raise DataError(f"{where}: cannot be compared with {record.name}: {error}") from None
        if not equal:
            raise DataError(f"{where}: its coefficients are not those of {record.name}")
        return True


@dataclass(frozen=True)
class Compared:
    """Counts of images with tiles that were to be compared with their originals."""

    equal: int = 0
    without_original: int = 0

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.equal + other.equal, self.without_original + other.without_original)


def tiles_compared(sample: Sample, where: str, originals: Originals | None) -> Compared:
    """Return the count of an image with tiles, compared with its original; of others, no count.

    DataError if its list of tiles does not fit it, or its coefficients are not the original's.
    """
    frame, where = jpeg_frame(sample.image), f"{where}: sample {sample.key}"
    if frame is None or not frame.tiles_at:
        return Compared()
    if not has_sound_tiles(sample.image, frame):
        raise DataError(f"{where}: its list of tiles does not fit it")
    if originals is None:
        return Compared()
    if originals.check(sample.image, original_digest(sample.image, frame), where):
        return Compared(equal=1)
    return Compared(without_original=1)
