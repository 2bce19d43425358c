"""`rackrun doctor`: convert looks at data, training at labels; only the roof knows both."""

from collections.abc import Sequence

from rackrun.contract.suspects import Question, SuspectLabel
from rackrun.convert.doctor.command import run


def main(args: Sequence[str]) -> int:
    """Run the command; torch is imported only where a model is given."""
    return run(args, _suspects)


def _suspects(question: Question) -> list[SuspectLabel]:
    from rackrun.training.judge.labels import suspects

    return suspects(question)
