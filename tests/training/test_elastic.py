"""Elastic runs on real ranks with gloo: ranks are lost and join, and the run is the same."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.errors import UsageError
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint, ranks, world
from rackrun.training.config import Config
from rackrun.training.meeting_point import HELLO, MOST_STRANGERS
from rackrun.training.membership import GroupOrder, RankMembership
from rackrun.training.run.resume import Earlier
from tests import warm
from tests.launcher.lab import children
from tests.training.membership_server import ROOT, SCRIPT, MembershipServer
from tests.training.trained_rows import NOTED, exact_epochs
from tests.waiting import until

SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "exact_epochs": True,
    "global_batch": 12,
    "batch_size": 4,
    "workers": 0,
    "lr": 0.05,
    "image_size": 8,
    "tensorboard": False,
    "log_every_steps": 3,
}


@pytest.fixture(scope="module")
def data(make_shards: Callable[..., Path]) -> Path:
    """Return shards with 50 training and 13 validation images: the last step has 2 samples."""
    return make_shards(train=(20, 20, 10), val=(8, 5))


Start = Callable[..., MembershipServer]


@pytest.fixture
def start(tmp_path: Path, data: Path) -> Iterator[Start]:
    """Return a function that starts a run on some hosts; `die`: where which of them ends."""
    servers = []

    def start(
        die: dict[int, dict[str, Any]] | None = None,
        hosts: tuple[int, ...] = (1, 1, 1),
        **options: Any,
    ) -> MembershipServer:
        settings = {**SETTINGS, "data": str(data), **options}
        server = MembershipServer(tmp_path, hosts, **settings)
        servers.append(server)
        for host in range(len(hosts)):
            server.start(host, **(die or {}).get(host, {}))
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that nothing disturbs."""
    return trained_alone(data, tmp_path_factory.mktemp("undisturbed"))


def trained_alone(data: Path, folder: Path, **options: Any) -> Path:
    """Train in one process; return the run's folder."""
    alone = {"data": str(data), "run_folder": str(folder), "batch_size": 12}
    options = {**SETTINGS, **alone, **options}
    result = warm.run(
        SCRIPT,
        json.dumps(options),
        "{}",
        env={**os.environ, "PYTHONPATH": str(ROOT), "STEPS": os.devnull, **NOTED},
    )
    assert result.returncode == 0, result.stderr
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    final: dict[str, torch.Tensor] = checkpoint.read(RunFolder(folder).final)["model"]
    return final


def evaluations(folder: Path) -> list[float]:
    """Return the losses of evaluations, in order."""
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "evaluate"]


def check(server: MembershipServer, undisturbed: Path) -> Path:
    """Assert that a run ended as if nothing had happened; return its folder."""
    first = server.members[0]
    hosts = (host for host in server.hosts if first - host.first in range(host.ranks))
    folder = next(hosts).folder / "run"
    check_weights(folder, undisturbed)
    assert evaluations(folder) == pytest.approx(evaluations(undisturbed), abs=1e-5)
    runs = [host.folder / "run" for host in server.hosts]
    assert len(exact_epochs(*runs, folder)) == 2, server.outputs()
    for number, formed in server.formed.items():
        assert len({(each["step"], each["digest"]) for each in formed.values()}) == 1, number
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "evaluate"] == [5, 10]
    trained = [line["step"] for line in lines if line["kind"] == "train"]
    assert trained == sorted(set(trained)) and {5, 10} <= set(trained)
    assert RunFolder(folder).report.exists() and RunFolder(folder).best.exists()
    return folder


def check_weights(folder: Path, undisturbed: Path) -> None:
    final, expected = weights(folder), weights(undisturbed)
    assert max(float((final[name] - expected[name]).abs().max()) for name in expected) < 1e-9


def test_a_run_that_loses_nobody_is_whole(start: Start, undisturbed: Any) -> None:
    """Three ranks under the launcher's orders train as one process does."""
    server = start()
    server.run_to_the_end()
    assert server.codes == {0: [0], 1: [0], 2: [0]} and server.left == {0, 1, 2}
    check(server, undisturbed)


LOSSES = {
    "in a forward pass": {1: {"at": "loss", "step": 3}},
    "rank 0": {0: {"at": "loss", "step": 3}},
    "before its update": {1: {"at": "advance", "step": 2}},
    "after its update": {1: {"at": "advanced", "step": 2}},
    "rank 0 after its update": {0: {"at": "advanced", "step": 2}},
    "in the Join tail": {0: {"at": "advance", "step": 4}},
    "in the Join tail, without samples": {2: {"at": "begin", "step": 4}},
    "after the Join tail": {0: {"at": "advanced", "step": 4}},
    "in an evaluation": {1: {"at": "evaluate"}},
    "rank 0 after an evaluation": {0: {"at": "evaluated"}},
    "in a save": {0: {"at": "save"}},
    "in the last step": {1: {"at": "advance", "step": 9}},
    "at the end": {0: {"at": "finish"}},
    "while the first group forms": {1: {"at": "agree", "step": 1}},
    "two at once": {0: {"at": "loss", "step": 3}, 2: {"at": "loss", "step": 3}},
    "while the next group forms": {
        1: {"at": "loss", "step": 2},
        0: {"at": "agree", "step": 2},
    },
}


@pytest.mark.parametrize("die", LOSSES.values(), ids=LOSSES)
def test_the_others_go_on_as_if_nothing_had_happened(
    start: Start, undisturbed: Any, die: dict[int, dict[str, Any]]
) -> None:
    """Wherever ranks are lost: weights as of one process, every sample once, all files."""
    server = start(die)
    server.run_to_the_end()
    lost = set(die)
    assert server.codes == {n: [-9] if n in lost else [0] for n in range(3)}, server.outputs()
    check(server, undisturbed)


def test_a_host_that_returns_joins_and_can_go_on_alone(start: Start, undisturbed: Any) -> None:
    """It gets the state at a step's end, and with it all that makes a run folder whole."""
    server = start({1: {"at": "loss", "step": 2}}, pause=0.15)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    server.start(1)
    server.run(lambda: len(server.formed.get(3, ())) == 3)
    assert server.orders[2]["members"] == [0, 2, 1]
    server.kill(0)
    server.run(lambda: len(server.formed.get(4, ())) == 2)
    server.kill(2)
    server.run_to_the_end()
    assert server.codes == {0: [-9], 1: [-9, 0], 2: [-9]}, server.outputs()
    assert check(server, undisturbed) == server.hosts[1].folder / "run"


def test_a_silent_rank_is_left_behind_and_fenced_off(start: Start, undisturbed: Any) -> None:
    """The others' blocked exchange ends as soon as the launcher gives the rank up.

    When it wakes up, it ends, without a word to the group.
    """
    server = start({1: {"at": "loss", "step": 3, "signal": "SIGSTOP"}})
    server.run(lambda: not is_running(server.hosts[1].processes[0].pid))
    given_up = time.monotonic()
    server.give_up(1)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    assert time.monotonic() - given_up < 10
    server.kill(1, signal.SIGCONT)
    server.run_to_the_end()
    assert server.codes == {0: [0], 1: [75], 2: [0]}, server.outputs()
    assert "silent for too long" in (server.hosts[1].folder / "printed").read_text()
    check(server, undisturbed)


def test_ranks_whose_launcher_is_gone_keep_their_last_step(
    start: Start, undisturbed: Any, data: Path, tmp_path: Path
) -> None:
    """The furthest of them is what a restart goes on from."""
    server = start(pause=0.1)
    server.run(lambda: step(server, 0) >= 3)
    server.end()
    server.run_to_the_end()
    assert server.codes == {n: [75] for n in range(3)}, server.outputs()
    kept = [RunFolder(host.folder / "run") for host in server.hosts]
    steps = [[path.name for path in checkpoint.steps_in(run.checkpoints)] for run in kept]
    assert all(len(names) == 1 and names[0] >= "step-00000003.pt" for names in steps), steps
    furthest = max(
        kept, key=lambda run: [path.name for path in checkpoint.steps_in(run.checkpoints)]
    )
    after = trained_alone(data, tmp_path / "after", resume=str(furthest.path))
    check_weights(after, undisturbed)
    assert len(exact_epochs(*(run.path for run in kept), after)) == 2


def test_a_restart_on_other_hosts_has_the_images_per_step_of_before() -> None:
    """Hosts are lost for good or were added: with --elastic the batch of the checkpoint stays."""
    earlier = Earlier(Path("step-00000007.pt"), {"identity": {"global batch": 12}}, b"")
    assert earlier.resolved(Config(elastic=True)).global_batch == 12
    assert earlier.resolved(Config(elastic=True, global_batch=8)).global_batch == 8
    assert not earlier.resolved(Config()).global_batch


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "T"


def test_a_newcomer_is_lost_while_it_joins(start: Start, undisturbed: Any) -> None:
    """The others have its place empty again, and their state as it was."""
    server = start({1: {"at": "loss", "step": 2}}, pause=0.1)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    server.start(1, at="agree", step=1)
    server.run_to_the_end()
    assert server.codes == {0: [0], 1: [-9, -9], 2: [0]}, server.outputs()
    assert len(server.orders) == 4
    check(server, undisturbed)


def test_a_newcomer_joins_after_another_was_lost_while_it_connected(
    start: Start, undisturbed: Any
) -> None:
    """The rank that it joins has tried to form a group, alone since, and the newcomer has not.

    That rank filled its cache before the first step, and does not fill it again with the newcomer.
    """
    server = start({0: {"at": "loss", "step": 2}}, (1, 1), pause=0.1, prefetch=True)
    server.run(lambda: bool(server.formed.get(2)))
    server.start(0, at="connect", after=0.5)
    server.run(lambda: bool(server.formed.get(4)))
    server.start(0)
    server.run_to_the_end()
    assert server.codes == {0: [-9, -9, 0], 1: [0]}, server.outputs()
    assert len(server.orders) == 5
    check(server, undisturbed)


def test_the_rank_that_hands_its_state_over_is_lost(start: Start, undisturbed: Any) -> None:
    """Another one hands it over, and the newcomer has not taken a part of it."""
    die = {0: {"at": "hand over"}, 1: {"at": "loss", "step": 2}}
    server = start(die, pause=0.1)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    server.start(1)
    server.run_to_the_end()
    assert server.codes == {0: [-9], 1: [-9, 0], 2: [0]}, server.outputs()
    check(server, undisturbed)


def test_a_newcomer_with_other_data_is_refused(
    start: Start, undisturbed: Any, make_shards: Callable[..., Path]
) -> None:
    """A host that finds another version of the data by now says so, and does not train on it."""
    server = start({1: {"at": "loss", "step": 2}}, pause=0.1)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    server.options["data"] = str(make_shards(train=(20, 20, 11), val=(8, 5)))
    server.start(1)
    server.run_to_the_end()
    assert server.codes == {0: [0], 1: [-9, 75], 2: [0]}, server.outputs()
    printed = (server.hosts[1].folder / "printed").read_text()
    assert "reads other data than rank 0" in printed and "type --data FOLDER@N" in printed
    check(server, undisturbed)


def test_a_newcomer_that_comes_too_late_ends(start: Start, undisturbed: Any) -> None:
    """The others finish before it is in their group: it ends, and does not train from the start."""
    die = {0: {"at": "finish", "signal": "SIGSTOP"}, 1: {"at": "loss", "step": 2}}
    server = start(die)
    server.run(lambda: not is_running(server.hosts[0].processes[0].pid))
    server.start(1)
    server.run(lambda: bool(server.orders) and server.orders[-1]["members"] == [0, 2, 1])
    server.kill(0, signal.SIGCONT)
    server.run_to_the_end()
    assert server.codes == {0: [0], 1: [-9, 75], 2: [0]}, server.outputs()
    check(server, undisturbed)


def test_an_evaluation_that_is_cut_off_does_not_count(start: Start, undisturbed: Any) -> None:
    """A rank that is alone, and whose group is given up meanwhile, evaluates once more."""
    server = start({0: {"at": "evaluate", "signal": "SIGSTOP"}}, hosts=(1,))
    server.run(lambda: not is_running(server.hosts[0].processes[0].pid))
    server.regroup()
    server.kill(0, signal.SIGCONT)
    server.run_to_the_end()
    assert server.codes == {0: [0]} and len(server.orders) == 2, server.outputs()
    check(server, undisturbed)


def test_a_newcomer_that_ends_alone_has_the_best_weights(
    start: Start, data: Path, tmp_path: Path
) -> None:
    """It joins while the best evaluation is still being saved, and no later one is better."""
    options = {"final": "best", "lr": 2.0, "lr_schedule": "constant", "warmup_epochs": 0, "seed": 2}
    expected = trained_alone(data, tmp_path / "alone", **options)
    assert checkpoint.read(RunFolder(expected).best)["state"]["epoch"] == 1
    die = {0: {"at": "finish"}, 1: {"at": "loss", "step": 2}}
    released = tmp_path / "released"
    server = start(die, (1, 1), pause=0.2, saves_wait_for=str(released), **options)
    server.run(lambda: 0 in server.formed.get(2, ()) and step(server, 0) >= 6)
    server.start(1)
    server.run(lambda: server.number == 3)
    given = time.monotonic()
    server.run(lambda: time.monotonic() > given + 1)
    released.touch()
    server.run_to_the_end()
    assert server.codes == {0: [-9], 1: [-9, 0]}, server.outputs()
    check_weights(server.hosts[1].folder / "run", expected)


def step(server: MembershipServer, host: int) -> int:
    """Return the steps that the first rank of a host has taken."""
    path = server.hosts[host].folder / "steps-0"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(lines[-1].split()[2]) if lines else 0


def test_hosts_of_several_ranks_and_loader_workers(start: Start, undisturbed: Any) -> None:
    """A host is lost with all its ranks; the same workers of the others read the new cut."""
    server = start({0: {"at": "loss", "step": 3}}, hosts=(2, 2), workers=2, pause=0.2)
    server.run(lambda: len(server.formed.get(1, ())) == 4)
    pids = [process.pid for process in server.hosts[1].processes]
    helpers = until(lambda: len(processes := below(pids)) == 8 and processes)
    server.run(lambda: len(server.formed.get(2, ())) == 2)
    server.start(0)
    server.run(lambda: server.number > 2 and len(server.formed.get(server.number, ())) == 4)
    assert helpers <= below(pids), "workers were started again"
    server.run_to_the_end()
    assert server.codes == {0: [-9, 0], 1: [-9, 0], 2: [0], 3: [0]}, server.outputs()
    check(server, undisturbed)


def test_as_many_ranks_as_a_host_has_are_on_two_hosts(start: Start, undisturbed: Any) -> None:
    """They do the same exchanges, though one of them has as many neighbours as there are ranks."""
    server = start({0: {"at": "loss", "step": 3}}, hosts=(2, 1))
    server.loses_hosts = False
    server.run_to_the_end()
    assert server.codes == {0: [-9], 1: [0], 2: [0]}, server.outputs()
    assert server.orders[1]["members"] == [1, 2]
    check(server, undisturbed)


def below(pids: list[int]) -> set[int]:
    """Return the processes of ranks: of each a server that forks, a tracker, and two workers."""
    return {process for pid in pids for process in children(pid)}


def test_batch_norms_are_put_back(start: Start) -> None:
    """Statistics that a lost forward pass has changed do not count twice."""
    settings = {"norm": True, "epochs": 1, "global_batch": 12}
    server = start({1: {"at": "advance", "step": 3}}, **settings)
    server.run_to_the_end()
    folder = server.hosts[0].folder / "run"
    counted = weights(folder)["layers.1.num_batches_tracked"]
    assert int(counted) == 5


def test_what_cannot_be_elastic_is_refused_with_what_to_type() -> None:
    """Copies of an image on certain ranks."""
    for options, message in (
        ({"aug_repeats": 3}, "--elastic and --aug-repeats exclude each other"),
    ):
        with pytest.raises(UsageError, match=message):
            Config(elastic=True, data="data", **options)
    Config(elastic=True, data="data", global_batch=64)


def test_on_gpus_a_communicator_is_aborted_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL would wait for ranks that are lost: the launcher's order ends what runs on the device,
    and the group is aborted, not destroyed, before the next one is made."""
    calls: list[str] = []

    class Nccl:
        def _get_backend(self, device: torch.device) -> "Nccl":
            assert device.type == "cuda"
            return self

        def abort(self) -> None:
            calls.append("abort")

    def init(backend: str, rank: int, world_size: int, device_id: object, **rest: object) -> None:
        assert "cuda:nccl" in backend and device_id == device
        calls.append(f"init {rank} of {world_size}")

    device, distributed = torch.device("cuda", 0), torch.distributed.distributed_c10d
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(world, "rank_device", lambda *which: device)
    monkeypatch.setattr(world, "_store", lambda *which: None)
    monkeypatch.setattr(world, "_check_fingerprints", lambda each: None)
    monkeypatch.setattr(ranks.Ranks, "all_gather", lambda self, numbers: [numbers])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("bad"))
    monkeypatch.setattr(distributed, "_abort_process_group", lambda: calls.append("abort all"))
    monkeypatch.setattr(distributed, "_get_default_group", Nccl)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        membership = RankMembership(str(tmp_path / "agent"), 0, 0)
        connection, _ = agent.accept()
        config = Config(elastic=True, data="data", device="cuda")
        group = world.alone(config)
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        for number, members in ((1, [0, 1, 2]), (2, [0, 2])):
            order = {"generation": number, "rank": 0, "world": len(members), "members": members}
            order |= {"master": ["127.0.0.1", 1], "token": "0" * 32, "abort": number > 1}
            connection.sendall(json.dumps(order).encode())
            generation = membership.awaited(10)
            assert generation
            if order["abort"]:
                until(lambda: "abort" in calls)
            with membership.forming(generation):
                group = world.in_group(group, generation, membership, config)
        membership.leave()
        connection.close()
        until(lambda: membership._agent.fileno() < 0)
    assert [name for name in calls if name != "abort"] == [
        "init 0 of 3",
        "abort all",
        "init 0 of 2",
    ]
    assert calls.index("abort") < calls.index("abort all")


def test_survivors_of_a_run_that_ends_keep_its_last_whole_step(
    data: Path, undisturbed: Any, tmp_path: Path
) -> None:
    """A restart loses no step that was finished, and a spoiled copy is passed over."""
    options = {**SETTINGS, "data": str(data), "batch_size": 6, "save_steps": 2}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"STEPS": os.devnull, **NOTED}
    first = RunFolder(tmp_path / "first")
    for folder, die, codes in (
        (first, {"rank": "1", "at": "loss", "step": 4}, [1, -9]),
        (RunFolder(tmp_path / "second"), {}, [0, 0]),
    ):
        options["run_folder"] = str(folder.path)
        job = warm.ranks(2, SCRIPT, json.dumps(options), json.dumps(die), env=env)
        assert [rank.wait(90) for rank in job] == codes
        if folder is first:
            saved = checkpoint.steps_in(first.checkpoints)
            assert [path.stem for path in saved] == ["step-00000002", "step-00000003"]
            shutil.copy(saved[1], first.checkpoint(4))
            flip_a_byte(first.checkpoint(4))
            options["earlier_attempts"] = str(first.path)
    check_weights(tmp_path / "second", undisturbed)
    assert exact_epochs(first.path, folder.path) == [[2], [2]]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_strangers_take_no_place_in_a_group_and_delay_no_member(tmp_path: Path) -> None:
    """Of many who call rank 0, only those who know the token of the group learn its port."""
    with ExitStack() as opened:
        agent = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        members = [RankMembership(str(tmp_path / "agent"), number, 0) for number in range(3)]
        connections = [opened.enter_context(agent.accept()[0]) for _ in members]
        for member in members:  # before its agent is gone, which would end this process
            opened.callback(member.leave)
        members[0].announce()
        master = "127.0.0.1", json.loads(connections[0].recv(100))["ready"]
        orders = [GroupOrder(1, rank, 3, (0, 1, 2), master, "0a" * 16) for rank in range(3)]
        strangers = []
        for hello in (b"", HELLO.pack(bytes(16), 1), HELLO.pack(b"\n" * 16, 2)[:9], b"\xff" * 20):
            for _ in range(MOST_STRANGERS):
                strangers.append(opened.enter_context(socket.create_connection(master)))
                strangers[-1].sendall(hello)
        with ThreadPoolExecutor(3) as threads, members[0].forming(orders[0]):
            leader = threads.submit(members[0].tell_members, orders[0], 4711)
            others = [threads.submit(members[rank].store_port, orders[rank]) for rank in (1, 2)]
            assert [each.result() for each in (leader, *others)] == [None, 4711, 4711]
        assert {stranger.recv(2) for stranger in strangers} == {b""}
