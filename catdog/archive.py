"""Drawn images in an archive of the layout that Kaggle's `train.zip` has.

Several processes draw, each every n-th image, and each sends its images through a pipe of its
own. So neither order nor bytes depend on how many there are, none draws far ahead, and one whose
reader is gone ends by itself.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.catdog.drawing import KINDS, jpeg
from rackrun.errors import Problem
from rackrun.machine import core_count

Member = tuple[str, bytes]  # name in the archive, content

HELD = (signal.SIGINT, signal.SIGTERM)


def write_archive(
    path: Path,
    images: int,
    seed: int = 0,
    comment: str = "",
    tell: Callable[[], object] = lambda: None,
) -> None:
    """Write a number of drawn images, whole or not at all (SaveError).

    `tell` is called after each image.
    """
    with atomic_write(path) as file, translated_os_errors(path), ZipFile(file, "w") as archive:
        archive.comment = comment.encode()
        for name, content in drawn(images, seed):
            archive.writestr(ZipInfo(name), content)
            tell()


def drawn(images: int, seed: int = 0, processes: int = 0) -> Iterator[Member]:
    """Yield drawn images, cats and dogs in turn; `processes`: 0 for one on each core."""
    count = processes or core_count()
    with _drawing(images, seed, count) as pipes:
        for number_in_archive, pipe in enumerate(islice(cycle(pipes), images)):
            kind, number = _image(number_in_archive)
            try:
                content = pipe.recv_bytes()
            except EOFError:
                raise Problem(
                    "a process that draws was ended from outside (is the memory full?);"
                    " type the same command again"
                ) from None
            yield f"train/{kind}.{number}.jpg", content


@contextmanager
def _drawing(images: int, seed: int, count: int) -> Iterator[list[Connection]]:
    # The n-th pipe gives every count-th image from the n-th on.
    context = get_context("spawn")
    pipes, processes = [], []
    try:
        with _interrupts_held():
            for first in range(count):
                pipe, end = context.Pipe(duplex=False)
                share = range(first, images, count)
                process = context.Process(target=_draw, args=(end, seed, share), daemon=True)
                process.start()
                end.close()
                pipes.append(pipe)
                processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()


def _draw(end: Connection, seed: int, share: range) -> None:
    with suppress(BrokenPipeError):  # nobody reads on
        for number_in_archive in share:
            kind, number = _image(number_in_archive)
            end.send_bytes(jpeg(kind, seed, number))


def _image(number_in_archive: int) -> tuple[str, int]:
    number, kind = divmod(number_in_archive, len(KINDS))
    return KINDS[kind], number


@contextmanager
def _interrupts_held() -> Iterator[None]:
    # Processes started here leave Ctrl-C and TERM to this one from the outset: they inherit that
    # both are blocked. In this process another thread may still take a signal, so it is only noted,
    # and raised once all processes are there to be ended.
    resource_tracker.ensure_running()  # else the first of them starts it, which lets signals in
    caught: list[int] = []
    before = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in HELD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
