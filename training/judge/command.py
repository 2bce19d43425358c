"""python -m training evaluate: evaluate a trained model on a split of a data set.

torch is imported once there is something to evaluate, so that `--help` answers at once.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rackrun.atomic import write_whole
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.tables import require_folder
from training.data.worker_server import start_worker_server
from training.judge.request import Evaluate


def main(args: Sequence[str]) -> int:
    """Evaluate as a rank of torchrun, or alone; rank 0 writes for all."""
    given = parse(Evaluate, called("evaluate"), args)
    require_folder(given.csv)
    if given.workers:
        start_worker_server("training.data.validation")
    from training.judge.evaluation import evaluate

    result = evaluate(given)
    if result.first:
        if given.csv:
            write_whole(Path(given.csv), result.table)
        if given.json:
            sys.stdout.write(json.dumps(result.judgement.plain(), indent=1) + "\n")
        else:
            from training.judge.output import print_judgement

            print_judgement(result.judgement)
    return 0
