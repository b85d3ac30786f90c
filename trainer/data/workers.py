"""Start a rank's loader processes, which end exactly when the rank ends.

Slurm's scancel, systemd and Ctrl-C in a terminal signal all processes of a job. But only a rank
knows at which step to stop, and the rank needs batches until then. Loaders therefore block these
signals. Loaders end when the rank has no more work for them, or at once when the rank dies: a
loader holds the rank's connections open, and the peers notice only a connection that closes.
"""

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
from .folder import SMALL_PX

FEW_IMAGES = 4096  # to decode so many small images takes less time than to start processes
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def worker_count(options: Options, world: World, size: int, images: int) -> int:
    """Return the number of loader processes for `images` of `size` pixels a side: --workers if it
    is given, none for few small images, otherwise this rank's share of the machine's cores."""
    if options.workers is not None:
        return options.workers
    if size <= SMALL_PX and images <= FEW_IMAGES:
        return 0
    # One core is left for the ranks themselves.
    return min(16, max(1, (count_cores() - 1) // world.local_size))


def data_loader(
    dataset: Dataset[Any],
    steps: Iterable[Any],
    collate: Callable[[Any], Any],
    workers: int,
    pinned: bool = False,
    persistent: bool = False,
) -> DataLoader[Any]:
    """Make a DataLoader over `steps` of indices. `persistent`: its processes outlive an epoch."""
    return DataLoader(
        dataset,
        batch_sampler=steps,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        # Without this generator, the loader would draw from the global generator in each epoch.
        generator=torch.Generator(),
        # Python 3.14's default would import torch again in each process.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(end_with, os.getpid()),
        persistent_workers=persistent and workers > 0,
    )


def start_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return iter(loader). Its processes inherit that SIGTERM and SIGINT are blocked. Call this
    from the main thread: see `end_with`."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        return iter(loader)
    finally:
        # This process now gets a signal that came in the meantime.
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def end_with(parent: int, worker: int = 0) -> None:
    """Let Linux kill this process when the process `parent`, which started it, ends. `worker`: the
    number that torch passes, unused.

    Linux sends the signal when the *thread* that started this process ends, so this thread must
    live as long as the parent: main threads start loaders and the ranks of --spawn.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
