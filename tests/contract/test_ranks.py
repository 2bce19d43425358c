"""What ranks get from a run and give to it: variables, every byte of output, reports, failures."""

import json
import random
import re

from tests.lab.run import run
from tests.lab.warm import ROOT

PAGE = ROOT / "docs" / "guides" / "own-script.md"


def ended(tmp_path, script, *options, **more):
    (tmp_path / "script.py").write_text(script)
    return run(["./run-local", *options, "--", "python", "script.py"], tmp_path, **more)


def result_of(tmp_path):
    (result,) = tmp_path.glob("runs/2*/result.json")
    return json.loads(result.read_text())


def test_the_script_of_the_page_runs_as_it_is_printed(tmp_path):
    """Two ranks under torchrun; the result has the last values of rank 0."""
    script, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    result = ended(tmp_path, script, "--nproc", "2")
    assert result.code == 0, result.said
    assert result_of(tmp_path)["report"] == {"step": 30, "loss": 1 / 30, "accuracy": 0.9}


SHOW = "import os; print(sorted(n for n, v in os.environ.items() if v == '55555'))\n"


def test_variables_of_another_launcher_do_not_reach_ranks(tmp_path):
    """A run inside a step of Slurm does not take its rank from there."""
    names = ("SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MINE")
    result = ended(tmp_path, SHOW, env=dict.fromkeys(names, "55555"))
    assert (result.code, result.out) == (0, "['MINE']\n"), result.said


WRITES = """\
import os, random, sys
data = random.Random(int(os.environ["RANK"])).randbytes(1 << 20)
for start in range(0, len(data), 7777):
    sys.stdout.buffer.write(data[start:start + 7777]); sys.stdout.flush()
    sys.stderr.buffer.write(data[start:start + 7777][::-1]); sys.stderr.flush()
"""


def test_every_byte_of_every_rank_is_in_its_log(tmp_path):
    """Random bytes on both streams of three ranks."""
    assert ended(tmp_path, WRITES, "--nproc", "3").code == 0
    for rank in range(3):
        data = random.Random(rank).randbytes(1 << 20)
        pieces = [data[start : start + 7777] for start in range(0, len(data), 7777)]
        expected = {"out": data, "err": b"".join(piece[::-1] for piece in pieces)}
        for stream, bytes_written in expected.items():
            (log,) = tmp_path.glob(f"runs/2*/logs/*/*/rank-{rank}.{stream}")
            assert log.read_bytes() == bytes_written


RAISES = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
for step in range(10**9):
    dist.all_reduce(one)
    if step == 50 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.")
    time.sleep(0.01)
"""


def test_the_exception_of_one_rank_is_shown_once_and_not_its_peers(tmp_path):
    """One of two raises between two all-reduces: its traceback once, with advice."""
    result = ended(tmp_path, RAISES, "--nproc", "2")
    assert result.code == 1, result.said
    assert result.said.count("Traceback") == 1
    assert "Connection closed" not in result.said
    last = result.err.splitlines()[-1]
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB."
    assert f"failed: rank 1 on localhost: {cause}; log: " in last
    assert "a smaller --batch-size" in last
