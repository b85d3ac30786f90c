"""Loader processes: how many a rank has, and how they live exactly as long as the rank does.

Slurm's scancel, systemd and Ctrl-C in a terminal signal all processes of a job. But only a rank
knows at which step to stop, and until then it needs the batches of its loaders, so the loaders
block these signals. They end when the rank has no more work for them, or at once when the rank
dies: they hold its connections open, and its peers notice its death only when these are closed.
"""

import contextlib
import ctypes
import os
import signal
from functools import partial
from typing import Any, Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from contract.options import Options
from tandem.coordinates import count_cores

from ..world import World
from .folder import SMALL

FEW = 4096  # images: decoding this many small ones takes less time than starting processes
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def worker_count(options: Options, world: World, size: int, images: int) -> int:
    """Count this rank's loader processes for `images` of `size` pixels: the option if it is given,
    none for a few small images, else the rank's share of the machine's cores but one."""
    if options.workers is not None:
        return options.workers
    if size <= SMALL and images <= FEW:
        return 0
    # One core is for training itself.
    return min(16, max(1, (count_cores() - 1) // world.local_size))


def data_loader(
    dataset: Dataset[Any],
    steps: Iterable[Any],
    collate: Callable[[Any], Any],
    workers: int,
    pinned: bool = False,
    persistent: bool = False,
) -> DataLoader[Any]:
    """Make torch's DataLoader over `steps` of indices. `persistent`: its processes outlive an
    epoch."""
    return DataLoader(
        dataset,
        batch_sampler=steps,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        # Without this generator, each epoch would draw from the global one.
        generator=torch.Generator(),
        # The default of Python 3.14 would import torch again in each of them.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(end_with, os.getpid()),
        persistent_workers=persistent and workers > 0,
    )


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return iter(loader). Its processes start with SIGTERM and SIGINT blocked, and keep them so.
    Call it from the main thread: see `end_with`."""
    with blocked(signal.SIGTERM, signal.SIGINT):
        return iter(loader)


@contextlib.contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Hold back signals that arrive within the block; they are delivered afterwards."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def end_with(parent: int, worker: int = 0) -> None:
    """Have this process killed when the process `parent`, which started it, is gone.

    Linux sends that signal when the *thread* that started this process ends, so this must be a
    thread that lives as long as the parent: main threads start loaders and the ranks of --spawn.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # gone already
        os._exit(1)
