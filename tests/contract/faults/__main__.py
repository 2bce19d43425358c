"""Random faults at random moments: `python -m tests.contract.faults --rounds 500 --seed 7`.

Round N of seed S is the same fault at the same moment every time:

    python -m tests.contract.faults --seed S --only N
"""

import argparse
import signal
import sys
import time

from tests.contract.faults import rows_attached, rows_others
from tests.lab.fault_labs import burning, campaign, table


def main():
    """Play rounds and print what came of them; 1 when any promise was broken."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--only", type=int, help="one round, by its number")
    parser.add_argument("--kind", default="", help="a part of the names of the rows to draw from")
    parser.add_argument("--busy", type=int, default=0, help="cores to keep busy meanwhile")
    parser.add_argument("--slow", type=float, default=1.5, help="factor for all promised times")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # with `&`, a shell ignores some
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    rows = [row for row in (*rows_attached.ROWS, *rows_others.ROWS) if options.kind in str(row)]
    numbers = range(options.rounds) if options.only is None else [options.only]
    outcomes = []
    with burning(options.busy):
        for number, outcome in campaign(rows, options.seed, numbers, options.slow):
            outcomes.append(outcome)
            print(f"{number:4} {outcome.code!s:>5} {outcome.seconds:5.1f} s  {outcome.fault}")
            if outcome.violations:
                print("     | " + str(outcome).replace("\n", "\n     | "))
            sys.stdout.flush()
    print(f"\nseed {options.seed}, {len(outcomes)} rounds\n\n{table(outcomes)}")
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
