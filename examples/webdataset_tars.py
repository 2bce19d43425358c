"""Write tars with webdataset, and train on them as they are: python examples/webdataset_tars.py."""

import io
import random

import webdataset
from PIL import Image, ImageDraw

import rackrun

CLASSES = ("disc", "square")


def draw_jpeg(kind: str) -> bytes:
    """Return a JPEG with a disc or a square."""
    image, x, y = Image.new("RGB", (64, 64)), random.randrange(40), random.randrange(40)
    canvas = ImageDraw.Draw(image)
    draw = canvas.ellipse if kind == "disc" else canvas.rectangle
    draw((x, y, x + 20, y + 20), fill="orange")
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


def write(pattern: str, images: int) -> None:
    """Write tars of 50 images each."""
    with webdataset.ShardWriter(pattern, maxcount=50, verbose=0) as writer:
        for number in range(images):
            label = number % len(CLASSES)
            image = draw_jpeg(CLASSES[label])
            writer.write({"__key__": f"{number:06}", "jpg": image, "cls": label})


if __name__ == "__main__":
    write("shapes-%06d.tar", 200)
    write("val-%06d.tar", 50)
    run = rackrun.train(
        "classify",
        data="shapes-{000000..000003}.tar",  # or URLs, or pipe:COMMAND
        eval_data="val-000000.tar",
        resampled=True,
        epoch_samples=200,
        num_classes=len(CLASSES),
        model="resnet18",
        weights="",
        image_size=32,
        epochs=1,
        device="cpu",
        workers=0,
    )
    print(run.path)
