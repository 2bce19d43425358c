"""python -m imagenet: train; `predict` names what images show, `check` judges options."""

from functools import partial

from training.entry import enter, run_command

main = partial(run_command, "imagenet", "python -m imagenet")

if __name__ == "__main__":
    enter(main)
