"""Hosts with unequal numbers of GPUs, as a probe finds them in /dev."""

from tests.lab.hosts import wait_for_banner
from tests.lab.needs import need

DEVICES = """\
made=$(mktemp -d) && mount -t tmpfs none "$made" || exit 1
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$made"
ln -s /proc/self/fd "$made/fd"
for number in $0; do touch "$made/nvidia$number"; done
touch "$made/nvidiactl" "$made/nvidia-uvm"
mount --move "$made" /dev && rmdir "$made" && exec "$@"
"""


def test_another_number_of_gpus_is_refused_unless_slots_say_so(start_lab):
    """Two GPUs here, one there: 78, both numbers named; with slots= three ranks are one world."""
    need("root")
    lab = start_lab(0)
    for numbers in ("0 1", "0"):
        host = lab.start(command=("unshare", "--mount", "sh", "-c", DEVICES, numbers))
        wait_for_banner(host.address, host.port)
    lab.trust()
    python = f"python={lab.cheap_python()}"
    show = ("--", "sh", "-c", "echo one of $WORLD_SIZE")
    code, _, err = lab.result_of(str(lab.write_hosts(python)), *show)
    assert code == 78
    assert "127.0.0.3: gpus: 127.0.0.2 has 2" in err
    assert not (lab.folder / "runs").exists()
    code, _, err = lab.result_of(
        str(lab.write_hosts(f"{python} slots=2", f"{python} slots=1")), *show
    )
    assert code == 0, err
    text = {path.name: path.read_text() for path in lab.folder.glob("runs/2*/logs/*/*/rank-*.out")}
    assert text == {f"rank-{rank}.out": "one of 3\n" for rank in range(3)}
