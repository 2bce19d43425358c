"""What people met when they launched; each test is a kind, after public reports."""

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rackrun
from tests.lab.hosts import Lab, wait_for_banner
from tests.lab.run import Result, start
from tests.lab.waiting import until
from tests.lab.warm import free_port


def check(lab: Lab, *words: str, **more: object) -> tuple[int, str]:
    """Check the lab's hosts; return the exit code and what is said."""
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, out, err = lab.result_of("--check", os.fspath(hosts), *words, **more)
    return code, out + err


def launch(lab: Lab, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Start a command on the lab's hosts; return the exit code and what is said."""
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, out, err = lab.result_of(*options, os.fspath(hosts), "--", *words)
    return code, out + err


# Logging in


@pytest.mark.parametrize("algorithm", ["RSA -pkeyopt rsa_keygen_bits:2048", "ED25519"])
def test_a_key_in_pkcs8_logs_in_and_keeps_no_other_key_from_being_tried(algorithm, lab):
    lab.ready(1)
    key = lab.folder / "pk8"
    line = ["openssl", "genpkey", "-algorithm", *algorithm.split(), "-out", os.fspath(key)]
    subprocess.run(line, check=True, capture_output=True)
    key.chmod(0o600)
    lab.configure(f"IdentityFile {key}")
    code, said = check(lab)
    assert code == 0, said


@pytest.mark.parametrize("behind_a_gateway", [False, True])
def test_a_second_factor_is_named(behind_a_gateway, lab):
    methods = "PasswordAuthentication yes\n  AuthenticationMethods publickey,password\n"
    gateway = lab.start(extra=f"Match user {getpass.getuser()}\n  {methods}")
    wait_for_banner(gateway.address, gateway.port)
    host = lab.ready(1).hosts[1]
    hosts = [host] if behind_a_gateway else [gateway]
    if behind_a_gateway:
        lab.configure(f"Host {host.address}", f"  ProxyJump {gateway.line}")
    path = lab.folder / "hosts.txt"
    path.write_text("".join(f"{each.line} python={lab.cheap_python()}\n" for each in hosts))
    code, out, err = lab.result_of("--check", os.fspath(path))
    assert code == 77, out + err
    assert "password" in out + err


def test_an_agent_that_is_gone_is_named(lab):
    lab.ready(1)
    lab.config.write_text(f"Host *\n  UserKnownHostsFile {lab.known_hosts}\n")
    gone = {"SSH_AUTH_SOCK": "/tmp/ssh-XXXXgone/agent.4711"}
    code, said = check(lab, env=gone)
    assert code == 77, said
    assert "SSH_AUTH_SOCK" in said


def test_a_usual_key_that_cannot_be_read_here_is_named(lab):
    lab.ready(1)
    lab.config.write_text(f"Host *\n  UserKnownHostsFile {lab.known_hosts}\n")
    key = lab.home / ".ssh" / "id_ed25519_sk"
    key.parent.mkdir(parents=True, exist_ok=True)
    key.write_text("a key on a device\n")
    key.chmod(0o600)
    code, said = check(lab, env={"SSH_AUTH_SOCK": ""})
    assert code == 77 and key.name in said and "holds no private key" in said, said


@pytest.mark.parametrize("criterion", ["localnetwork 203.0.113.0/24", "tagged office"])
def test_settings_of_newer_clients_are_understood_where_the_ssh_here_understands_them(
    criterion, lab
):
    lab.ready(1)
    lab.configure(f"Match host *.office.example {criterion}", "  ProxyJump none")
    line = ["ssh", "-G", "-F", os.fspath(lab.config), "a"]
    is_understood = subprocess.run(line, capture_output=True, check=False).returncode == 0
    code, said = check(lab)
    assert code == (0 if is_understood else 64), said
    assert is_understood or criterion.split()[0] in said


# The account's start-up files


def test_a_bashrc_that_starts_another_shell_runs_or_is_named(lab):
    lab.ready(1)
    (lab.hosts[0].folder / ".bashrc").write_text("exec zsh -l\n")
    code, said = launch(lab, "true")
    assert code == 0 or "bashrc" in said or "another shell" in said, said


def test_a_bashrc_that_reads_standard_input_is_named(lab):
    lab.ready(1)
    (lab.hosts[0].folder / ".bashrc").write_text("read -p 'continue? ' answer\n")
    code, said = launch(lab, "true")
    assert code == 69 and "standard input" in said, said


def test_a_rank_has_what_was_typed_rather_than_what_its_bashrc_exports(lab):
    lab.ready(1)
    bashrc = "export LR=0.5 GLOO_SOCKET_IFNAME=eth9 MASTER_PORT=1\n"
    (lab.hosts[0].folder / ".bashrc").write_text(bashrc)
    show = 'echo "lr $LR port $MASTER_PORT"'
    code, said = launch(lab, "bash", "-c", show, options=("--env", "LR=0.1"))
    assert code == 0, said
    assert "lr 0.1 port " in said and "port 1\n" not in said, said


def test_an_interpreter_that_the_folder_chooses_is_the_one_of_the_ranks(lab):
    lab.ready(1)
    shims, versions = lab.folder / "shims", lab.folder / "versions"
    shims.mkdir()
    versions.mkdir()
    shim = shims / "python3"
    shim.write_text(
        '#!/bin/sh\nd=$PWD\nwhile [ "$d" != / ] && [ ! -f "$d/.python-version" ]; do\n'
        f'd=$(dirname "$d"); done\nexec "{versions}/$(cat "$d/.python-version" 2>/dev/null ||'
        ' echo plain)" "$@"\n'
    )
    (versions / "with-torch").write_text(f'#!/bin/sh\nexec {lab.cheap_python()} "$@"\n')
    (versions / "plain").write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    for program in (shim, *versions.iterdir()):
        program.chmod(0o755)
    (lab.hosts[0].folder / ".bashrc").write_text(f"PATH={shims}:$PATH\n")
    (lab.folder / ".python-version").write_text("with-torch\n")
    hosts = lab.write_hosts()
    code, out, err = lab.result_of("--check", os.fspath(hosts))
    assert code == 0, out + err


def test_a_script_that_a_rank_runs_finds_the_interpreter_of_the_rank(lab):
    lab.ready(1)
    (lab.folder / "train.sh").write_text("command -v python\n")
    code, said = launch(lab, "sh", "train.sh")
    assert code == 0 and f"{Path(sys.executable).parent}/python\n" in said, said


def test_an_interpreter_that_setup_puts_first_is_the_one_of_the_ranks(lab):
    lab.ready(1)
    environment = lab.folder / "environment"
    environment.mkdir()
    (environment / "python3").symlink_to(lab.cheap_python())
    hosts = lab.write_hosts(f'setup="echo activated; PATH={environment}:$PATH"')
    code, out, err = lab.result_of(os.fspath(hosts), "--", "true")
    assert code == 0, out + err


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "WANDB_MODE", "NCCL_DEBUG"])
def test_a_variable_of_this_shell_that_ranks_do_not_get_is_named(name, lab):
    lab.ready(1)
    line = (lab.cheap_hosts(), "--", "true")
    code, out, err = lab.result_of(*line, env={name: "1"})
    assert code == 0 and f"--env {name}" in err, out + err
    _, out, err = lab.result_of("--env", name, *line, env={name: "1"})
    assert "set here but not" not in err, out + err


# Names and addresses


def test_a_host_given_by_a_name_that_it_takes_for_itself_is_not_reached_by_loopback(net):
    lab = net(2)
    with (lab.etc[2] / "hosts").open("a") as file:
        file.write("10.77.0.11 node1\n")
    one, two = lab.hosts
    hosts = lab.folder / "hosts.txt"
    hosts.write_text(f"node1:{one.port} address=node1\nnode2:{two.port}\n")
    python = os.fspath(lab.cheap_python())
    code, out, err = lab.result_of("--python", python, "--dry-run", os.fspath(hosts), "--", "true")
    assert code == 0, out + err
    assert "SOCKET_IFNAME=lo" not in out + err


def test_a_first_host_whose_name_is_loopback_here_runs_or_is_explained(net):
    lab = net(2)
    with (lab.etc[1] / "hosts").open("a") as file:
        file.write("10.77.0.12 node2\n")
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    on_node1 = ("ip", "netns", "exec", lab.names[0])
    port = lab.hosts[0].port
    by_loopback = lab.start("127.0.1.1", command=on_node1, port=port)
    until(lambda: "Server listening" in by_loopback.log, "sshd listens", 20)
    with lab.known_hosts.open("a") as file:
        file.write(f"[node1]:{port} {by_loopback.public_key}\n")
    words = ("--ssh-config", os.fspath(lab.config), os.fspath(hosts), "--", "true")
    process = lab.launcher(*words, before=on_node1, python=lab.python())
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 or "loopback" in err or "this machine" in err, out + err


def test_a_port_that_another_program_has_is_said_to_be_that(lab):
    host = lab.ready(1).hosts[0]
    with socket.create_server((host.address, 0)) as other:
        port = str(other.getsockname()[1])
        code, said = launch(lab, "true", options=("--port", port))
    assert code == 78 and "in use" in said and "--port" in said and "firewall" not in said, said


# Folders


def test_a_folder_that_is_a_link_here_is_looked_for_as_it_was_typed(lab):
    export, there, here = (lab.folder / name for name in ("export", "there", "here"))
    for folder in (export / "proj", there / "proj", here):
        folder.mkdir(parents=True)
    (here / "proj").symlink_to(export / "proj")
    mounts = f"mount --bind {there} {here} && mount -t tmpfs none {export}"
    lab.start(command=("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"))
    until(lambda: "Server listening" in lab.hosts[0].log, "sshd listens", 20)
    lab.trust()
    code, said = check(lab, cwd=here / "proj", env={"PWD": os.fspath(here / "proj")})
    assert code == 0, said


def test_a_rank_starts_in_its_folder_also_by_the_name_of_the_folder(lab):
    lab.ready(1)
    code, said = launch(lab, "sh", "-c", 'echo "in $PWD"')
    assert code == 0, said
    assert f"in {lab.folder}" in said


def test_a_current_folder_that_is_gone_is_one_line(tmp_path):
    gone = tmp_path / "gone"
    line = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {sys.executable} -m rackrun local -- true"
    result = subprocess.run(
        ["sh", "-c", line],
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode not in (0, 70), result
    assert "Traceback" not in result.stderr
    assert "folder" in result.stderr or "directory" in result.stderr


# Hosts files and commands of other launchers


def test_a_node_file_that_names_a_host_once_per_slot_gives_as_many_ranks(lab):
    lab.ready(2)
    nodes = lab.folder / "nodefile"
    nodes.write_text("".join(f"{host.line}\n" * 4 for host in lab.hosts))
    python = os.fspath(lab.cheap_python())
    code, out, err = lab.result_of("--python", python, "--dry-run", os.fspath(nodes), "--", "true")
    assert code == 0, out + err
    assert "8 ranks" in out + err


def nodes(folder: Path, *works: str) -> list[Result]:
    """Start two nodes by hand, whose run folders are their own; return how they ended."""
    port = str(free_port("127.0.0.1"))
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NNODES": "2"}
    started = [
        start(
            f"rackrun node --wait-seconds 60 --runs r{rank} {work}",
            folder,
            env={**world, "NODE_RANK": str(rank)},
        )
        for rank, work in enumerate(works)
    ]
    texts = [process.communicate(timeout=120) for process in started]
    codes = [process.wait() for process in started]
    return [Result(code, *text, folder) for code, text in zip(codes, texts, strict=True)]


def test_nodes_started_with_other_options_never_train_together(tmp_path):
    task = "catdog --synthetic --epochs 1 --steps-per-epoch 2 --batch-size 4"
    results = nodes(tmp_path, f"{task} --lr 0.1", f"{task} --lr 0.5")
    assert all(result.code for result in results), results
    assert any("--lr" in result.err or "catdog" in result.err for result in results), results


def test_nodes_that_share_no_folder_run(tmp_path):
    results = nodes(tmp_path, *["-- sh -c 'echo rank $RANK'"] * 2)
    for rank, result in enumerate(results):
        assert result.code == 0 and f"rank {rank}" in result.out, results
        assert len(list((tmp_path / f"r{rank}").glob("2*/output*.log"))) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_torchrun_in_a_script_starts_no_second_world(size, lab):
    """Each of several ranks would train alone; a single one may start others itself."""
    lab.ready(size)
    train = "python -m torch.distributed.run --nproc-per-node 2 rank.py"
    (lab.folder / "train.sh").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n{train}\n")
    (lab.folder / "rank.py").write_text("print('trains')\n")
    code, said = launch(lab, "bash", "train.sh")
    if size == 1:
        assert code == 0 and "trains" in said, said
    else:
        assert code and "trains" not in said and "start python train.py instead" in said, said


def test_a_module_that_launches_itself_does_so_once(tmp_path):
    module = "from rackrun import launch\ndef train(): return 1\nlaunch('me:train', nproc=1)\n"
    (tmp_path / "me.py").write_text(module)
    line = [sys.executable, "me.py"]
    variables = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])}
    result = subprocess.run(
        line, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert "this is a rank already" in result.stdout + result.stderr
    assert len(list((tmp_path / "runs").glob("2*"))) == 1


def test_hosts_may_be_a_list_in_python():
    with pytest.raises(Exception, match="there is no host named no.such.invalid"):
        rackrun.launch("--", "true", hosts=["no.such.invalid"])


# The code that --sync copies


def repository(folder: Path, files: dict[str, str], *modules: Path) -> Path:
    """Make a repository of git with these files, and others as its submodules."""
    folder.mkdir()
    options = ("-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always")
    for name, text in files.items():
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name.encode("latin-1"))).write_text(text)
    for words in (
        ("init", "-q"),
        *(("submodule", "add", "-q", module, module.name) for module in modules),
        ("add", "-A"),
        ("commit", "-qm", "code"),
    ):
        subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True)
    return folder


def synced(lab: Lab, folder: Path, **variables: str) -> tuple[set[str], str]:
    """Sync a folder to the lab's host; return the files that are there, and what is said."""
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    there = lab.folder / "there"
    options = ("--sync", "--workdir", os.fspath(there))
    line = (*options, os.fspath(hosts), "--", "true")
    code, out, err = lab.result_of(*line, cwd=folder, env=variables)
    assert code == 0, out + err
    return {path.name for path in there.rglob("*.py")}, out + err


def test_the_files_of_a_submodule_are_copied_too(lab):
    lab.ready(1)
    inner = repository(lab.folder / "inner", {"inner.py": ""})
    outer = repository(lab.folder / "outer", {"outer.py": ""}, inner)
    assert synced(lab, outer)[0] == {"inner.py", "outer.py"}


def test_a_name_that_is_not_utf8_keeps_no_other_file_from_being_copied(lab):
    lab.ready(1)
    folder = repository(lab.folder / "code", {"train.py": "", "gr\xfcn.py": ""})
    names, said = synced(lab, folder)
    assert names == {"train.py"}
    assert "not UTF-8" in said


def test_a_launch_from_a_hook_of_git_copies_the_folder_that_it_is_typed_in(lab):
    lab.ready(1)
    other = repository(lab.folder / "other", {"other.py": ""})
    folder = repository(lab.folder / "code", {"train.py": ""})
    assert synced(lab, folder, GIT_DIR=f"{other}/.git")[0] == {"train.py"}


# What is seen meanwhile


@pytest.mark.parametrize("step", ["\\rstep {i}/600", "step {i}/600 "])
def test_progress_without_a_line_feed_is_seen_before_it_ends(step, lab):
    lab.ready(1)
    bar = (
        "import sys, time\n"
        "for i in range(600):\n"
        f"    sys.stderr.write(f'{step}')\n    sys.stderr.flush()\n    time.sleep(0.1)\n"
    )
    (lab.folder / "bar.py").write_text(bar)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    process = lab.run_ssh(os.fspath(hosts), "--", "python", "bar.py")
    try:
        for line in process.stdout:
            if "step " in line and "/600" in line:
                break
        else:
            pytest.fail("the bar was not shown")
    finally:
        process.terminate()
        process.communicate(timeout=60)
