"""python -m catdog: train, `demo` (draw), `predict` (name the animal), `check` options."""

from training.entry import enter, train


def main(args: list[str]) -> int | None:
    """Do what the first word says; without one, train."""
    if args[:1] == ["demo"]:
        from catdog import demo

        return demo.main(args[1:])
    if args[:1] == ["predict"]:
        from catdog import predict

        return predict.main(args[1:])
    return train("catdog", args)


if __name__ == "__main__":
    enter(main)
