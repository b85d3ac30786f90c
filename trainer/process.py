"""Run one process of a run, from its options to its exit code; start the processes of `--spawn N`.

__main__.py calls `begin`. world.py finds the other ranks, and train.py or predict.py does the work.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Optional, Sequence, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from contract.errors import INTERRUPTED, OUT_OF_MEMORY, UserError
from contract.options import Options
from tandem.coordinates import read_coordinates

from .data.workers import end_with
from .decide import decide
from .errors import report_error
from .memory import is_out_of_memory
from .predict import infer
from .screen import quiet_others
from .train import Run, Trial, train
from .world import start

# Until the remaining ranks of --spawn are killed, after a rank has failed, or has finished.
GRACE_SECONDS, TEAR_DOWN_SECONDS = 10.0, 120.0


@record
def begin(options: Options) -> int:
    """Run as one process of a run, or start the ranks of --spawn; return the exit code."""
    try:
        if options.spawn > 1 and "RANK" not in os.environ:
            return spawn(options)
        return work(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def work(options: Options) -> int:
    """Train, predict or extract as one rank; return its exit code."""
    try:
        world = start(options)
        quiet_others(world)
        options, world = decide(options, world)
        if options.results:
            code = infer(options, world)
        else:
            code = train((Trial if options.trial else Run)(options, world))
    except UserError as error:
        return report_error(error, read_coordinates(os.environ, options.local_rank))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(
            f"trainer: rank {read_coordinates(os.environ).rank}: out of memory: {error}",
            file=sys.stderr,
        )
        return OUT_OF_MEMORY
    if world.exchange is not None:
        # All ranks come here. They end together, so no peer sees a broken connection.
        world.exchange.meet()
        dist.destroy_process_group()
    return code


def leave(code: int) -> NoReturn:
    """Flush this process's output, and end the process with exit code `code`.

    Python's own end would need a second of processor time to free torch's modules, and would wait
    for loaders that hang in a read and for remaining ranks of --spawn.
    """
    for child in multiprocessing.active_children():
        child.kill()
    # While the process group exists, a collective may be in flight that no peer will finish.
    # The exit functions would wait for the collective, or NCCL's watchdog would end the process
    # with another exit code and more messages. Without them, the error stays the last message.
    if not dist.is_initialized():
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn(options: Options) -> int:
    """Start `options.spawn` ranks as processes. Return the first failure's exit code."""
    # The kernel chooses a free port for the probe. Rank 0 listens on this port later.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = str(options.spawn)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_run_rank, args=(number, os.getpid(), options))
        for number in range(options.spawn)
    ]

    def terminate_ranks(*_: object) -> None:
        for rank in filter(BaseProcess.is_alive, ranks):
            rank.terminate()

    signal.signal(signal.SIGTERM, terminate_ranks)
    for rank in ranks:
        rank.start()
    return first_failure(ranks)


def _run_rank(rank: int, parent: int, options: Options) -> None:
    """Run as rank `rank` of --spawn, and exit."""
    end_with(parent)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.spawn))
    try:
        code = work(options)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


def first_failure(ranks: Sequence[BaseProcess]) -> int:
    """Wait for all ranks; return the exit code of the first that failed, or 0.

    Ranks exit together. A rank that still runs GRACE_SECONDS after another rank failed is killed:
    it would wait in a collective forever. A rank that still runs TEAR_DOWN_SECONDS after another
    rank has finished is killed, too.
    """
    running, code = {rank.sentinel: rank for rank in ranks}, 0
    patience: Optional[float] = None
    while running:
        sentinels = connection.wait(list(running), patience)
        if not sentinels:
            for rank in running.values():
                rank.kill()
        # No sentinel means that the time was over: all ranks that still ran have just been killed.
        for sentinel in sentinels or list(running):
            rank = running.pop(int(cast(Any, sentinel)))
            rank.join()
            exit_code = rank.exitcode or 0
            # `exitcode` is -9 after SIGKILL. A shell reports 128 + 9.
            code = code or (exit_code if exit_code >= 0 else 128 - exit_code)
        patience = GRACE_SECONDS if code else TEAR_DOWN_SECONDS
    return code
