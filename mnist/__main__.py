"""python -m rackrun.mnist: train; `predict` reads digits in images, `check` judges options."""

from functools import partial

from rackrun.training.entry import enter, run_command

main = partial(run_command, "mnist", "python -m rackrun.mnist")

if __name__ == "__main__":
    enter(main)
