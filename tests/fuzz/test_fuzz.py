"""Any bytes at all are a value or the documented error, in everything that decodes foreign data."""

import subprocess
import sys

import pytest
from hypothesis import given

from rackrun.launcher.preflight.replies import REPLIES
from rackrun.launcher.supervision.agent_protocol import HOST_EVENTS, RANK_EVENTS
from rackrun.launcher.supervision.reports import FIELDS
from tests.fuzz.decoders import decoders
from tests.fuzz.fuzz import ROOT
from tests.fuzz.targets_agent import EVENTS, REPORT
from tests.fuzz.targets_probe import ANSWERS


@pytest.mark.security("FUZZ-1")
@pytest.mark.parametrize("decoder", decoders(), ids=lambda decoder: decoder.name)
def test_no_bytes_bring_a_decoder_to_a_traceback(decoder):
    for seed in decoder.seeds:
        decoder.function(seed)

    @given(decoder.inputs)
    def decode(data):
        decoder.function(data)

    decode()


def test_the_seeds_have_every_event_report_and_answer():
    """What is damaged is all that there is."""
    assert EVENTS.keys() == {*RANK_EVENTS, *HOST_EVENTS}
    assert REPORT.keys() == {*FIELDS}
    assert ANSWERS.keys() == {shape.question for shape in REPLIES}


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.security("FUZZ-1")
def test_ten_million_inputs_break_no_decoder():
    """No traceback, no input of more than a minute, none of more than 4 GiB."""
    args = [sys.executable, "-m", "tests.fuzz.fuzz", "--inputs", "10000000"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
