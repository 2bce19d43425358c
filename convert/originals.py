"""The images that a data set was made of, found by their digests, to compare stored ones with."""

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
from shards.samples import Sample
from shards.tiles import original_digest


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
    """Counts of stored images by how they compare with their originals."""

    same_bytes: int = 0
    same_coefficients: int = 0
    """Of images with tiles."""
    without_original: int = 0

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(
            self.same_bytes + other.same_bytes,
            self.same_coefficients + other.same_coefficients,
            self.without_original + other.without_original,
        )


def compared(sample: Sample, where: str, has_tiles: bool, originals: Originals | None) -> Compared:
    """Return the count of an image compared with its original; none where no originals are given.

    DataError if its list of tiles does not fit it in a data set that has tiles, or if its
    coefficients are not the original's.
    """
    frame = jpeg_frame(sample.image) if has_tiles else None
    tiled_frame = frame if frame and frame.tiles_at else None
    where = f"{where}: sample {sample.key}"
    if tiled_frame and not has_sound_tiles(sample.image, tiled_frame):
        raise DataError(f"{where}: its list of tiles does not fit it")
    if originals is None:
        return Compared()
    if sha256(sample.image).digest() in originals.records:
        return Compared(same_bytes=1)
    if tiled_frame:
        digest = original_digest(sample.image, tiled_frame)
        if originals.check(sample.image, digest, where):
            return Compared(same_coefficients=1)
    return Compared(without_original=1)
