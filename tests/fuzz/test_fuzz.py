"""Any bytes at all are a value or the documented error, in everything that decodes foreign data."""

import subprocess
import sys

import pytest
from hypothesis import given

from tests.fuzz.decoders import decoders
from tests.fuzz.fuzz import ROOT


@pytest.mark.security("FUZZ-1")
@pytest.mark.parametrize("decoder", decoders(), ids=lambda decoder: decoder.name)
def test_no_bytes_bring_a_decoder_to_a_traceback(decoder):
    for seed in decoder.seeds:
        decoder.function(seed)

    @given(decoder.inputs)
    def decode(data):
        decoder.function(data)

    decode()


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.security("FUZZ-1")
def test_ten_million_inputs_break_no_decoder():
    """No traceback, no input of more than a minute, none of more than 4 GiB."""
    args = [sys.executable, "-m", "tests.fuzz.fuzz", "--inputs", "10000000"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
