"""The phase between two groups of an elastic run: form the next one, with one state for all.

    lost exchange, or a newcomer          training.loop leaves its step, or has ended it
    the launcher orders a group           training.membership
    its ranks meet                        training.ranks
    the furthest whole state is sent to the ranks that have another one; newcomers have none
    the rest of the run is cut among them

A member may be lost here, too. The launcher orders another group then, and this attempt ends.
"""

from dataclasses import replace

import numpy as np

from rackrun.terminal import one_line
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.membership import WAITING_SECONDS, GroupOrder, RankMembership
from rackrun.training.phases.begin import open_folder
from rackrun.training.phases.start import TrainingRun
from rackrun.training.ranks import Ranks, is_of_exchange
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.state import TrainingState
from rackrun.training.world import WorldError, in_group


def regrouped(run: TrainingRun, state: TrainingState, log: RunRecorder) -> TrainingRun:
    """Return the run among the ranks of the next group, all of which have the same state.

    Raise the error of an exchange if the launcher does not find that a member was lost.
    """
    assert run.membership
    if not run.membership.current:
        run.membership.announce()
    while True:
        while not (order := run.membership.awaited(1.0)):
            if run.requests.ending:
                raise SystemExit(run.requests.ending)
        try:
            with run.membership.forming(order):
                return _joined(run, state, log, order)
        except (RuntimeError, OSError) as error:
            wait_for_order(run.membership, error)


def wait_for_order(membership: RankMembership, error: Exception) -> None:
    """Wait until the launcher orders another group; raise the error unless it is such a loss."""
    if not is_of_exchange(error):
        raise error
    membership.broken(one_line(str(error)))
    if not membership.awaited(WAITING_SECONDS):
        raise error


def _joined(
    run: TrainingRun, state: TrainingState, log: RunRecorder, order: GroupOrder
) -> TrainingRun:
    assert run.membership
    ranks = in_group(run.ranks, order, run.membership, run.config)
    if ranks.world > run.data.batch:
        raise WorldError(
            f"{ranks.world} ranks for steps of {run.data.batch} images: type --global-batch with a"
            " larger number"
        )
    _check_precision(run, ranks)
    _check_data(run, ranks)
    digest = _agree(ranks, state, log)
    among = replace(run, ranks=ranks, data=run.data.among(ranks))
    open_folder(among, state, log)
    run.membership.formed(state.step, digest)
    return among


def _check_precision(run: TrainingRun, ranks: Ranks) -> None:
    # `auto` may choose another one on each host.
    name = np.frombuffer(run.compute.precision.encode(), np.uint8)
    first = ranks.all_gather(name)[0].tobytes().decode()
    if first != run.compute.precision:
        raise WorldError(
            f"this rank computes in {run.compute.precision}, rank 0 in {first}: type --precision"
            f" {first}"
        )


def _check_data(run: TrainingRun, ranks: Ranks) -> None:
    # A host that joins late may find a newer version.
    digest = np.frombuffer(run.data.digest.encode(), np.uint8)
    if ranks.all_gather(digest)[0].tobytes().decode() != run.data.digest:
        raise WorldError(
            f"this rank reads other data than rank 0 ({', '.join(run.data.versions)}): if they got"
            " a new version meanwhile, type --data FOLDER@N with the one that the run began with"
        )


def _agree(ranks: Ranks, state: TrainingState, log: RunRecorder) -> str:
    # Every rank gets the furthest state of all: a survivor may have taken a step that another has
    # not; both are whole. Equal states are not moved.
    digest = state.digest()
    offer = [*log.position[:1], state.step, state.epoch, *log.position[1:], int(ranks.writes)]
    offers = ranks.all_gather(np.array([*offer, *bytes.fromhex(digest)], np.int64))
    positions = [tuple(each[:4].tolist()) for each in offers]
    source = positions.index(max(positions))
    if not all(is_in_run for is_in_run, *_ in positions):
        log.checkpoints.wait()  # newcomers get the host's files, or write them from now on
        ranks.all_reduce_max(0)
    behind = [
        rank
        for rank, each in enumerate(offers)
        if positions[rank] != positions[source] or (each[5:] != offers[source][5:]).any()
    ]
    for target in behind if ranks.rank == source else ():
        lacks_files = bool(offers[target][4]) and not positions[target][0]
        handover = {"state": state.state_dict(), "record": log.state_dict(lacks_files)}
        ranks.send_bytes(pack(handover), target)
    if ranks.rank in behind:
        handover = unpack(ranks.receive_bytes(source))
        state.load_state_dict(handover["state"])
        log.load_state_dict(handover["record"])
        digest = state.digest()
    for rank, each in enumerate(ranks.all_gather(np.frombuffer(bytes.fromhex(digest), np.uint8))):
        if each.tobytes().hex() != digest:
            raise WorldError(
                f"rank {rank} has another state than this one after it was handed over"
            )
    return digest
