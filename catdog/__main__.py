"""python -m catdog: train; `demo` draws data, `predict` names animals, `check` judges options."""

from functools import partial

from training.entry import enter, run_command

main = partial(run_command, "catdog", "python -m catdog")

if __name__ == "__main__":
    enter(main)
