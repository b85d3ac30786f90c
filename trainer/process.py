"""The processes of a run: what each of them does, and how `--spawn N` starts them."""

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

# Seconds that the other ranks of --spawn have to exit, once one has failed or is done.
GRACE, TEAR_DOWN = 10.0, 120.0


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
        # All ranks come here: leave together, so that no peer sees a connection break.
        world.exchange.meet()
        dist.destroy_process_group()
    return code


def leave(code: int) -> NoReturn:
    """Flush what this process has printed, and end it with `code`.

    Python's own end would spend a second of processor time on taking torch's modules apart, and
    would wait for loaders that hang in a read and for remaining ranks of --spawn.
    """
    for child in multiprocessing.active_children():
        child.kill()
    # While the process group exists, a collective may be in flight that no peer will finish.
    # Tear-down would wait for it, or NCCL's watchdog would end the process with another code and
    # messages of its own. So tear-down is skipped, and the error or the traceback stays last.
    if not dist.is_initialized():
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn(options: Options) -> int:
    """Start `options.spawn` processes and assign their ranks; return the first failure's exit
    code."""
    # The number of processes is also the world size, so the two cannot differ. A free port is taken
    # by its number: rank 0 listens on it later.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = str(options.spawn)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    context = multiprocessing.get_context("spawn")
    numbers = range(options.spawn)
    ranks = [context.Process(target=_run_rank, args=(n, os.getpid(), options)) for n in numbers]

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

    Ranks exit together. A rank that still runs GRACE seconds after another failed is waiting for it
    in a collective, and would wait for ever, so it is killed. A rank that still runs TEAR_DOWN
    seconds after another has finished is killed, too.
    """
    running, code = {rank.sentinel: rank for rank in ranks}, 0
    patience: Optional[float] = None
    while running:
        sentinels = connection.wait(list(running), patience)
        if not sentinels:
            for rank in running.values():
                rank.kill()
        for sentinel in sentinels or list(running):
            rank = running.pop(int(cast(Any, sentinel)))
            rank.join()
            exit_code = rank.exitcode or 0
            # A process that a signal has killed has the negative signal; a shell reports 128 +
            # signal.
            code = code or (exit_code if exit_code >= 0 else 128 - exit_code)
        patience = GRACE if code else TEAR_DOWN
    return code
