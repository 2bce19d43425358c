"""python -m imagenet: train, `predict` (name what pictures show), `check` options."""

from training.entry import enter
from training.nursery import open_nursery


def main(args: list[str]) -> int | None:
    """Do what the first word says; without one, train. Nothing is imported before it is needed."""
    if args[:1] == ["predict"]:
        from imagenet import predict

        return predict.main(args[1:])
    from imagenet.recipes import RECIPES
    from training.config import from_command_line

    asked = args[:1] == ["check"]
    config = from_command_line(RECIPES, "python -m imagenet", args[asked:])
    if asked:
        return 0
    if config.workers and not config.synthetic:
        open_nursery("imagenet.model")
    from imagenet.model import TASK
    from training import loop

    return loop.run(TASK, config)


if __name__ == "__main__":
    enter(main)
