"""python -m rackrun.catdog: train; `demo` draws data, `predict` names animals, `check` checks."""

from functools import partial

from rackrun.training.entry import enter, run_command

main = partial(run_command, "catdog", "python -m rackrun.catdog")

if __name__ == "__main__":
    enter(main)
