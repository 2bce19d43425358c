"""python -m catdog: train, `demo` (draw), `predict` (name the animal), `check` options."""

from training.entry import enter
from training.nursery import open_nursery


def main(args: list[str]) -> int | None:
    """Do what the first word says; without one, train. Nothing is imported before it is needed."""
    if args[:1] == ["demo"]:
        from catdog import demo

        return demo.main(args[1:])
    if args[:1] == ["predict"]:
        from catdog import predict

        return predict.main(args[1:])
    from catdog.recipes import RECIPES
    from training.config import from_command_line

    asked = args[:1] == ["check"]
    config = from_command_line(RECIPES, "python -m catdog", args[asked:])
    if asked:
        return 0
    if config.workers and not config.synthetic:
        open_nursery("catdog.model")
    from catdog.model import TASK
    from training import loop

    return loop.run(TASK, config)


if __name__ == "__main__":
    enter(main)
