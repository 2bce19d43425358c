"""python -m imagenet: train, `predict` (name what pictures show), `check` options."""

from training.entry import enter, train


def main(args: list[str]) -> int | None:
    """Do what the first word says; without one, train."""
    if args[:1] == ["predict"]:
        from imagenet import predict

        return predict.main(args[1:])
    return train("imagenet", args)


if __name__ == "__main__":
    enter(main)
