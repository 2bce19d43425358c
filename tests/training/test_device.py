"""What the settings of a device come to, before training begins."""

import multiprocessing
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from rackrun import machine
from rackrun.catdog.recipes import CatDog
from rackrun.errors import UsageError
from rackrun.training import device
from rackrun.training.data.worker_server import _stay_beside_the_rank
from rackrun.training.device import CODE_CACHE, set_up
from rackrun.training.ranks import Ranks
from tests.lab.needs import need

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.security("RUN-2")
def test_compiled_code_is_kept_where_no_other_account_may_put_some(monkeypatch, tmp_path):
    """torch loads what it finds there; by default that is in /tmp, open to any account."""
    config = replace(CatDog(), synthetic=True, compile=True)
    kept = tmp_path / "rackrun" / "inductor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CODE_CACHE, "")
    set_up(config, ALONE)
    assert (cache_dir(), kept.stat().st_mode & 0o777) == (str(kept), 0o700)
    set_up(config, ALONE)  # as the next rank, and the next run
    monkeypatch.setenv(CODE_CACHE, str(tmp_path / "chosen"))
    set_up(config, ALONE)
    assert os.environ[CODE_CACHE] == str(tmp_path / "chosen")


@pytest.mark.parametrize("planted", ["folder", "above", "open", "link", "file"])
@pytest.mark.security("RUN-2")
def test_a_folder_for_compiled_code_that_others_can_write_to_is_refused(
    planted, monkeypatch, tmp_path
):
    """What another account made first, or may replace, is not loaded code from."""
    kept = tmp_path / "rackrun" / "inductor"
    kept.parent.mkdir(mode=0o755)
    if planted == "link":
        kept.symlink_to(tmp_path)
    elif planted == "file":
        kept.touch()
    else:
        kept.mkdir(mode=0o755)
        if planted == "open":
            kept.chmod(0o777)
        else:
            need("root")
            os.chown(kept if planted == "folder" else kept.parent, 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CODE_CACHE, raising=False)
    named = kept.parent if planted == "above" else kept
    with pytest.raises(UsageError, match=f"no place for compiled code: .*{named}\\b.*export"):
        set_up(replace(CatDog(), synthetic=True, compile=True), ALONE)
    assert CODE_CACHE not in os.environ


LACKS = "not every GPU here has bfloat16 of its own"
IN_FLOAT16 = f"computes in float16 with a scaled loss: {LACKS} (--precision auto)"
IN_FLOAT32 = f"computes in float32: {LACKS} (--precision auto)"


@pytest.mark.parametrize(
    ("major", "others", "precision", "message"),
    [
        (9, 0, "bf16", ""),
        (8, 1, "fp16", IN_FLOAT16),  # beside a rank on a Turing
        (8, 2, "fp32", IN_FLOAT32),
        (7, 0, "fp16", IN_FLOAT16),
        (6, 0, "fp32", IN_FLOAT32),
    ],
)
def test_auto_is_the_fastest_precision_that_every_gpu_computes_in(
    major, others, precision, message, monkeypatch
):
    """Compute capability 7 only emulates bfloat16, 6 has no fast float16; a line about either."""
    gpu = SimpleNamespace(major=major, minor=5, name="Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    monkeypatch.setattr(Ranks, "all_reduce_max", lambda self, number: max(number, others))
    config = CatDog(synthetic=True)
    ranks = replace(ALONE, device=torch.device("cuda", 0))
    compute = set_up(config, ranks)
    assert (compute.precision, compute.remark(config)) == (precision, message)
    assert set_up(replace(config, precision="bf16"), ranks).autocast_dtype == torch.bfloat16
    as_asked = replace(config, precision="tf32")
    assert set_up(as_asked, ranks).precision == ("tf32" if major >= 8 else "fp32")
    assert torch.backends.cudnn.allow_tf32 == (major >= 8)
    set_up(config, ALONE)  # sums of float32 as before
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("emulates", [True, False])
def test_mixed_precision_that_a_cpu_emulates_is_said(emulates, monkeypatch):
    """Before step 1, with what to type: such a run takes several times as long. A CPU with products
    of its own in that type trains without a word, and so does float32 on any."""
    flags = set() if emulates else {"avx512bw", "avx512_fp16"}
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    for precision, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        config = replace(CatDog(synthetic=True), precision=precision)
        remark = set_up(config, ALONE).remark(config)
        slow = f"computes in {name}, which this CPU only emulates, several times slower than"
        assert remark == (f"{slow} float32: type --precision fp32" if emulates else "")
    config = CatDog(synthetic=True)
    assert set_up(config, ALONE).remark(config) == ""


def test_a_rank_runs_on_the_cores_beside_its_gpu(tmp_path, monkeypatch):
    """By the kernel's list for the PCI device; the usual number of workers stays that of all
    cores, and nothing is bound where the kernel knows nothing or --no-numa-binding is typed."""
    bound: list[set[int]] = []
    monkeypatch.setattr(machine, "core_count", lambda: 64)  # it would be remembered
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)) - {1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    for text, cores in (("0-2,32-33\n", {0, 2, 32, 33}), ("0-63", None), ("nonsense", None)):
        (device / "local_cpulist").write_text(text)
        assert machine.bind_near(device.name, tmp_path) == (cores is not None)
        assert bound == ([cores] if cores else [])
        bound.clear()
    assert not machine.bind_near("0000:ff:00.0", tmp_path) and not machine.bind_near("", tmp_path)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    _stay_beside_the_rank()  # a loader worker takes its rank's cores
    assert bound == [set(range(64)) - {1}]
    gpu = SimpleNamespace(
        major=9, minor=0, name="H100", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0
    )
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr("rackrun.training.device.bind_near", asked.append)
    ranks = replace(ALONE, device=torch.device("cuda", 0))
    for binds in (True, False):
        set_up(CatDog(synthetic=True, numa_binding=binds), ranks)
    set_up(CatDog(synthetic=True), ALONE)
    assert asked == ["0000:3b:00.0"]
