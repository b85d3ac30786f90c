"""The processes of a run: what each does, and `--spawn N` without a launcher."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, List, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .compat import is_out_of_memory
from .errors import OUT_OF_MEMORY, UserError, explain
from .logs import quiet_others
from .options import Options
from .predict import infer
from .settle import settle
from .train import train
from .world import place, start

GRACE = 10.0  # seconds that the others of --spawn have to leave once one has failed


def work(options: Options) -> int:
    """Train, predict or extract as one rank; returns its exit code."""
    try:
        world = start(options)
        quiet_others(world)
        options = settle(options, world)
        todo = infer if options.predict or options.extract else train
        code = todo(options, world)
    except UserError as error:
        return explain(error, place(os.environ, options.local_rank).local_rank)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"trainer: rank {place(os.environ).rank}: out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    if world.exchange is not None:
        # All ranks come here: leave together, so that no peer sees a connection break.
        world.exchange.meet()
        dist.destroy_process_group()
    return code


def leave(code: int) -> NoReturn:
    """End this process with `code`, after what it has said.

    While the process group stands, a collective may be under way that no peer will finish.
    Tear-down would wait for it, or NCCL's watchdog would end it with another code and lines of its
    own: so there is none, and the sentence or the traceback stays last.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def spawn(options: Options) -> int:
    """Run in `options.spawn` processes, ranks assigned here; returns the first failure's exit code.

    The number of processes and the world size are one number, so they cannot differ.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = str(options.spawn)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    context = mp.spawn(_child, (options,), nprocs=options.spawn, join=False)
    threading.Thread(target=_end_all, args=(context.processes,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in context.processes])
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        return error.exit_code
    return 0


def _child(rank: int, options: Options) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.spawn))
    try:
        code = work(options)
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


def _end_all(processes: List[Any]) -> None:
    """Once one has failed, kill those that are left after GRACE seconds: mp.spawn asks them to
    leave and waits, for ever where they wait in a collective."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(GRACE)
            for process in processes:
                process.kill()
            return
        time.sleep(0.5)
