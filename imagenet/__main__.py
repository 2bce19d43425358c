"""python -m rackrun.imagenet: train; `predict` names what images show, `check` judges options."""

from functools import partial

from rackrun.training.entry import enter, run_command

main = partial(run_command, "imagenet", "python -m rackrun.imagenet")

if __name__ == "__main__":
    enter(main)
