"""Hosts with little shared memory, or little that may be locked: named before ranks die of it."""

LITTLE = """\
mount -t tmpfs -o size=64m none /dev/shm
mount -t tmpfs none /sys/class
mkdir -p /sys/class/infiniband/mlx5_0
ulimit -l 8192
exec "$@"
"""


def test_little_shared_and_locked_memory_is_named_and_stops_no_run(start_lab):
    lab = start_lab(1, command=("unshare", "--mount", "sh", "-c", LITTLE, "sh"))
    hosts = lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}")
    code, out, _ = lab.result_of("--check", str(hosts))
    shown = " ".join(out.split())
    assert code == 0, out
    assert "/dev/shm has 64 MiB free" in shown
    assert "may lock 8192 KiB of memory" in shown
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 0, err
    assert "limits: /dev/shm has 64 MiB free" in err


def test_a_host_sets_up_the_environment_of_its_ranks(start_lab):
    """setup= is sourced in the working directory, before the interpreter; the others have none."""
    lab = start_lab(2)
    (lab.folder / "my env.sh").write_text('export SET_UP="$PWD $1"; set -- lost\n')
    common = f"python={lab.cheap_python()} workdir={lab.folder}"
    hosts = lab.write_hosts(f"{common} setup='source \"my env.sh\" $((40 + 2)); cd /tmp'", common)
    show = ("sh", "-c", 'echo "rank $RANK in $PWD: $SET_UP"')
    code, out, err = lab.result_of("--ignore-check", "code", str(hosts), "--", *show)
    assert code == 0, err
    assert f"rank 0 in {lab.folder}: {lab.folder} 42" in out
    assert f"rank 1 in {lab.folder}: \n" in out


def test_a_setup_that_fails_is_found_before_the_run(start_lab):
    lab = start_lab(1)
    common = f"python={lab.cheap_python()} workdir={lab.folder}"
    hosts = lab.write_hosts(f'{common} setup="source missing.sh"')
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 78
    assert "missing.sh: No such file or directory" in err
    hosts = lab.write_hosts(f"{common} setup=source env.sh")
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert (code, "quote the whole command" in err) == (64, True), err
