"""`--spawn N`: processes of this machine without a launcher, each told its rank."""

import os
import signal
import socket
import sys
from typing import Dict

import torch
import torch.multiprocessing as mp

from .errors import UserError
from .options import Options
from .process import work


def spawn(options: Options) -> int:
    """Run in `options.spawn` processes, ranks assigned here; returns the first failure's exit code.

    The number of processes and the world size are one number, so they cannot differ.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(options.spawn),
        "LOCAL_WORLD_SIZE": str(options.spawn),
        "GROUP_RANK": "0",
    }
    context = mp.spawn(_child, (options, shared), nprocs=options.spawn, join=False)
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in context.processes])
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        return error.exit_code
    return 0


def _child(rank: int, options: Options, shared: Dict[str, str]) -> None:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.spawn))
    try:
        code = work(options)
    except UserError as error:
        if rank == 0:
            print(f"trainer: {error}", file=sys.stderr)
        code = 2
    if code:
        sys.exit(code)
