"""python -m mnist: train; `predict` reads digits in images, `check` judges options."""

from functools import partial

from training.entry import enter, run_command

main = partial(run_command, "mnist", "python -m mnist")

if __name__ == "__main__":
    enter(main)
