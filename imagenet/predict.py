"""`python -m imagenet predict CHECKPOINT PICTURE…`: which of the classes?"""

from rackrun.commandline import parse
from training.predict import Predict, show


def main(args: list[str]) -> int:
    """Say for every picture what it shows; the exit code."""
    wish = parse(Predict, "python -m imagenet predict", args)
    from imagenet.model import TASK
    from imagenet.recipes import ImageNet

    return show(wish, TASK, ImageNet)
