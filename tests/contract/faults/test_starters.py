"""How a run was started decides what becomes of it when what started it ends.

`CODE saves`: it stops with this exit code, and ranks have saved because they were asked to;
`goes on`: it runs without what started it. The code is that of what started it; whoever is killed
has none, nor has the kernel of a notebook, whose pipe is that of the page. Signals to a step of
Slurm come from `scancel` and reach ranks as well, which ignore INT and HUP; with KILL and a closed
pipe it is `srun` that ends its step, or takes no notice. With `--on` the run is on another machine,
whose terminal Ctrl-C reaches; a pipe that is closed is that of `ssh`.
"""

import pytest

from tests.lab.starters import STARTERS, PipedOnTerminal

ENDS = ("INT", "INT INT", "TERM", "HUP", "KILL", "pipe closed")
STOPS = ("130 saves", "130 saves", "143 saves", "129 saves", "saves", "141 saves")
OUTCOMES = {
    "terminal": (*STOPS[:3], "goes on", *STOPS[4:]),
    "--on": ("130 saves", "130 saves", "goes on", "goes on", "goes on"),
    "no terminal": STOPS,
    "PID 1": STOPS,
    "srun": (*STOPS[:4], "stops", "goes on"),
    "launch()": STOPS,
    "notebook": ("saves", "saves", "saves", "saves", "saves", "goes on"),
}
SHORT = {
    *(("terminal", how) for how in ENDS),
    *((start, how) for start in ("no terminal", "launch()") for how in ("TERM", "HUP", "KILL")),
    *(("PID 1", "TERM"), ("no terminal", "pipe closed"), ("notebook", "KILL")),
}
CELLS = [
    pytest.param(
        *(start, how, outcome),
        id=f"{start} {how}",
        marks=[
            pytest.mark.slurm if start == "srun" else pytest.mark.root,
            *([] if (start, how) in SHORT else [pytest.mark.long]),
        ],
    )
    for start, outcomes in OUTCOMES.items()
    for how, outcome in zip(ENDS, outcomes, strict=False)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("start", "how", "outcome"), CELLS)
def test_what_started_a_run_ends_and_the_run_stops_or_goes_on(start, how, outcome, tmp_path):
    piped = (start, how) == ("terminal", "pipe closed")
    with (PipedOnTerminal if piped else STARTERS[start])(tmp_path) as run:
        run.start()
        assert run.end(how, 60) == outcome
