"""Which failure came first, and what is said about it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from contract.errors import DIVERGED
from launcher.watch import failures
from launcher.watch.failures import Failure, find_first_cause

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.3]:4711"


def failure(host="node1", source="worker", order=0, **fields):
    return Failure(host=host, source=source, order=order, **fields)


LOST = {"rank": 0, "exit_code": 1, "exception": PEER}
SAID = "trainer: the loss has been NaN since epoch 4, step 37: the run ends."


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        # Who only lost its peer explains nothing.
        (failure("node3", rank=2, exit_code=1, exception="ValueError: x"), [failure(**LOST)] * 2),
        (failure("node4", source="gone", message="no heartbeat for 15 s"), [failure(**LOST)]),
        (failure(rank=2, signal="SIGKILL", last_lines=(PEER,)), [failure(**LOST)]),
        (failure("node2", source="busy", message="in use"), [failure(rank=0, exit_code=9)]),
        # A worker's own error explains its launch; on one machine the guard knows the first.
        (failure(rank=0, exit_code=3), [failure(source="launch", exit_code=1)]),
        (failure(rank=1, signal="SIGKILL"), [failure(rank=0, exit_code=1, first_on_node=False)]),
        # All ranks end by it, and one says why.
        (
            failure(rank=0, exit_code=DIVERGED, last_lines=(SAID,), first_on_node=False),
            [failure(rank=1, exit_code=DIVERGED, last_lines=("4 steps an epoch",))],
        ),
    ],
)
def test_which_failure_explains_the_others(cause, others):
    cause = replace(cause, order=len(others))
    assert find_first_cause([*others, cause]) is cause


def test_a_failure_is_judged_once_and_by_the_beginning_of_its_lines(monkeypatch):
    """Lines that were made for these patterns cost seconds."""
    searched = []
    pattern = SimpleNamespace(search=lambda text: searched.append(len(text)))
    monkeypatch.setattr(failures, "PEER_LOST", pattern)
    monkeypatch.setattr(failures, "NCCL_PEER_LOST", pattern)
    told = [failure(rank=rank, exit_code=1, last_lines=("x" * 4096,) * 20) for rank in (0, 1)]
    for _ in range(3):
        assert find_first_cause(told).rank == 0
    assert len(searched) == 3 * len(told)  # twice by the one pattern, once by the other
    assert max(searched) < 20 * (failures.SEARCHED_CHARACTERS + 1)


# Words of torch and NCCL as they stand in their sources and in reports of users; never seen here.
WATCHDOG_OF_1_12 = (
    "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=120000) ran for 120710 milliseconds before timing out.",
    "[E ProcessGroupNCCL.cpp:414] Some NCCL operations have failed or timed out. Due to the "
    "asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
    "corrupted/incomplete data. To avoid this inconsistency, we are taking the entire process "
    "down.",
    "terminate called after throwing an instance of 'std::runtime_error'",
    "  what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
    "Timeout(ms)=120000) ran for 120710 milliseconds before timing out.",
)
FRAMES = tuple(f"frame #{n}: <unknown function> + 0x{n}f8 (in /lib/libc10.so)" for n in range(9))
REMOTE_OF_2 = (
    "[rank1]:[E1122 10:12:13.123 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
    "Process group watchdog thread terminated with exception: NCCL error: remote process exited or "
    "there was a network error, NCCL version 2.21.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer node2<43422>",
    "Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2027:",
    *FRAMES,
)


@pytest.mark.parametrize(
    ("lines", "end"), [(WATCHDOG_OF_1_12, {"signal": "SIGABRT"}), (REMOTE_OF_2, {"exit_code": 1})]
)
def test_whom_nccl_s_watchdog_ends_is_a_victim(lines, end):
    """They may report before the rank that ran out of memory, whose code decides what comes."""
    victim = failure("node1", order=0, rank=0, last_lines=lines, **end)
    cause = failure("node2", order=1, rank=1, exit_code=76, last_lines=(*lines[:1], "trainer: x"))
    assert victim.peer_lost
    assert not cause.peer_lost
    assert find_first_cause([victim, cause]) is cause


def test_an_own_error_before_nccl_s_abort_is_no_lost_peer():
    own = failure(rank=1, signal="SIGABRT", exception="ValueError: broken", last_lines=REMOTE_OF_2)
    assert not own.peer_lost
    said = ("trainer: rank 1: out of memory: CUDA out of memory", *REMOTE_OF_2)
    assert not failure(rank=1, signal="SIGABRT", last_lines=said).peer_lost
    assert not failure(rank=1, signal="SIGABRT", last_lines=("free(): invalid size",)).peer_lost
