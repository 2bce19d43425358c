"""`python -m catdog predict CHECKPOINT PICTURE…`: cat or dog?"""

from rackrun.commandline import parse
from training.predict import Predict, show


def main(args: list[str]) -> int:
    """Say for every picture what it shows; the exit code."""
    wish = parse(Predict, "python -m catdog predict", args)
    from catdog.model import TASK
    from catdog.recipes import CatDog

    return show(wish, TASK, CatDog)
