"""Which failure came first, and what is said about it."""

import string
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from contract.errors import DIVERGED
from launcher.watch import attempts, failures
from launcher.watch.attempts import exit_code, how_to_resume
from launcher.watch.failures import PEER_LOST, Failure, document, first_of
from launcher.watch.watch import Outcome

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.3]:4711"


def failure(host="node1", source="worker", order=0, **fields):
    return Failure(host=host, source=source, order=order, **fields)


def test_lost_peers_are_ranked_below_any_other():
    told = [
        failure("node1", order=0, rank=0, exit_code=1, exception=PEER),
        failure("node2", order=1, rank=1, exit_code=1, exception=PEER),
        failure("node3", order=2, rank=2, exit_code=1, exception="ValueError: broken"),
    ]
    assert first_of(told).host == "node3"


def test_a_machine_that_is_gone_explains_lost_peers():
    told = [
        failure("node1", order=0, rank=0, exit_code=1, exception=PEER),
        failure("node4", source="gone", order=1, message="no heartbeat for 15 s"),
    ]
    assert first_of(told).host == "node4"


def test_a_workers_own_error_explains_its_launch():
    told = [
        failure("node1", source="launch", order=0, exit_code=1),
        failure("node1", order=1, rank=0, exit_code=3),
    ]
    assert first_of(told).source == "worker"


def test_on_one_node_the_guard_knows_the_first():
    told = [
        failure(order=0, rank=0, exit_code=1, first_on_node=False),
        failure(order=1, rank=1, signal="SIGKILL"),
    ]
    assert first_of(told).rank == 1


def test_a_failure_is_judged_once_and_by_the_beginning_of_its_lines(monkeypatch):
    """Lines that were made for these patterns cost seconds."""
    searched = []
    pattern = SimpleNamespace(search=lambda text: searched.append(len(text)))
    monkeypatch.setattr(failures, "PEER_LOST", pattern)
    monkeypatch.setattr(failures, "NCCL_PEER_LOST", pattern)
    told = [failure(rank=rank, exit_code=1, last_lines=("x" * 4096,) * 20) for rank in (0, 1)]
    for _ in range(3):
        assert first_of(told).rank == 0
    assert len(searched) == 3 * len(told)  # twice by the one pattern, once by the other
    assert max(searched) < 20 * (failures.JUDGED + 1)


def test_a_signal_is_no_lost_peer_whatever_was_printed_before():
    assert not failure(rank=0, signal="SIGKILL", last_lines=(PEER,)).peer_lost


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


@pytest.mark.parametrize("lines", [WATCHDOG_OF_1_12, REMOTE_OF_2])
@pytest.mark.parametrize("end", [{"signal": "SIGABRT"}, {"exit_code": 1}])
def test_whom_nccl_s_watchdog_ends_is_a_victim(lines, end):
    """They may report before the rank that ran out of memory, whose code decides what comes."""
    victim = failure("node1", order=0, rank=0, last_lines=lines, **end)
    cause = failure("node2", order=1, rank=1, exit_code=76, last_lines=(*lines[:1], "trainer: x"))
    assert victim.peer_lost
    assert not cause.peer_lost
    assert first_of([victim, cause]) is cause


def test_an_own_error_before_nccl_s_abort_is_no_lost_peer():
    own = failure(rank=1, signal="SIGABRT", exception="ValueError: broken", last_lines=REMOTE_OF_2)
    assert not own.peer_lost
    said = ("trainer: rank 1: out of memory: CUDA out of memory", *REMOTE_OF_2)
    assert not failure(rank=1, signal="SIGABRT", last_lines=said).peer_lost
    assert not failure(rank=1, signal="SIGABRT", last_lines=("free(): invalid size",)).peer_lost


def test_torch_s_warnings_do_not_hide_our_sentence():
    warning = (
        "[rank0]:[W1122 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was "
        "not called before program exit, which can leak resources."
    )
    ours = "trainer: --model resnet81: torchvision has no such classifier"
    told = failure(rank=0, exit_code=2, last_lines=("Loading", ours, warning))
    assert document(told)["message"] == f"node1, rank 0: {ours}"


def test_the_rank_that_says_why_all_ended_explains_it():
    """Two ranks of a machine, and the silent one ended first; which machine is of no interest."""
    said = "trainer: the loss has been NaN since epoch 4, step 37: the run ends."
    silent = failure(order=0, rank=1, exit_code=DIVERGED, last_lines=("4 steps an epoch",))
    telling = failure(order=1, rank=0, exit_code=DIVERGED, last_lines=(said,), first_on_node=False)
    told = document(first_of([silent, telling]))
    assert told["message"] == said.removeprefix("trainer: ")
    assert "ARGS='--lr 0.01'" in told["remedy"]


def test_a_run_that_diverged_is_not_to_be_resumed():
    cause = failure(rank=0, exit_code=DIVERGED)
    assert "RESUME=r would repeat" in how_to_resume("r", True, cause)
    assert "make train RESUME=r" in how_to_resume("r", True, failure(exit_code=1))


def test_nothing_failed():
    assert first_of([]) is None


@pytest.mark.parametrize(
    ("exception", "word"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "BATCH"),
        ("OSError: [Errno 28] No space left on device", "room"),
        ("RuntimeError: The server socket has failed to listen: EADDRINUSE", "port"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration", "find_unused"),
        ("RuntimeError: Unable to find address for: eno7", "interface"),
        ("ModuleNotFoundError: No module named 'apex'", "apex"),
        ("ValueError: Expected more than 1 value per channel when training", "BATCH"),
        (
            "RuntimeError: one of the variables needed for gradient computation has been modified "
            "by an inplace operation",
            "one forward",
        ),
    ],
)
def test_pitfalls_are_explained_with_a_remedy(exception, word):
    told = document(failure(rank=0, exit_code=1, exception=exception))
    assert word in f"{told['message']} {told['remedy']}"
    assert told["message"].startswith("node1, rank 0")


def test_the_document_has_the_contracts_fields():
    told = document(failure(rank=2, exit_code=None, signal="SIGKILL", last_lines=("a", "b")))
    assert set(told) == {
        "host", "rank", "exit_code", "signal", "exception", "message", "remedy", "last_lines"
    }  # fmt: skip
    assert (told["signal"], told["last_lines"]) == ("SIGKILL", ["a", "b"])


@pytest.mark.parametrize("word", ["timeout ", "connect to ", "failed to recv ", "gloo/transport "])
def test_a_long_last_line_costs_work_in_proportion(word):
    def seconds(length):
        line = (word * length)[:length]
        took = []
        for _ in range(3):
            begin = time.process_time()
            assert PEER_LOST.search(line) is None
            took.append(time.process_time() - begin)
        return min(took)

    assert seconds(16 << 12) < 64 * seconds(1 << 12)  # 16 times the text; squared it would be 256


def test_a_new_kind_of_first_cause_is_one_entry(monkeypatch):
    """Sentence, remedy, exit code, rank and what comes next follow from its row alone."""
    warm = failures.FailureKind(
        lambda failure: failure.exit_code == 79,
        rank=failures.Rank.BUSY,
        sentence="{who}: its card was too hot ({own})",
        remedy="clean its fans",
        restart=failures.Restart.SAME_AGAIN,
        exit_code=79,
        no_resume="let it cool before RESUME={run}",
    )
    ended = failure(rank=3, exit_code=79, order=1, last_lines=("trainer: 98 degrees",))
    other = failure("node2", rank=0, exit_code=9)
    outcome = Outcome("failed", ended, 1.0, [], {})
    assert first_of([other, ended]) is other and attempts.decide(outcome, attempts.Limits(1, 1))
    assert "79" in document(ended)["message"]
    ended, other = replace(ended), replace(other)  # a failure is judged once
    outcome = Outcome("failed", ended, 1.0, [], {})
    monkeypatch.setattr(failures, "FAILURE_KINDS", (warm, *failures.FAILURE_KINDS))
    assert first_of([other, ended]) is ended
    told = document(ended)
    assert told["message"] == "node1, rank 3: its card was too hot (98 degrees)"
    assert told["remedy"] == "clean its fans"
    assert attempts.decide(outcome, attempts.Limits(1, 1)) is None
    assert exit_code(outcome) == 79
    assert how_to_resume("r", True, ended) == "let it cool before RESUME=r"
    helps = replace(warm, restart=failures.Restart.HELPS, reason="{host} was too hot")
    monkeypatch.setattr(failures, "FAILURE_KINDS", (helps, *failures.FAILURE_KINDS))
    limits, why = attempts.decide(outcome, attempts.Limits(1, 1))
    assert (limits.restarts, why) == (0, "node1 was too hot")


def test_a_machine_that_another_run_took_between_two_attempts_is_named():
    taken = failure(source="busy", message="it is in use by anna@desk: run r")
    told = document(taken)
    assert told["message"] == "node1: it is in use by anna@desk: run r"
    assert "QUEUE=1" in told["remedy"]


@pytest.mark.parametrize("kind", failures.FAILURE_KINDS)
def test_each_sentence_has_its_remedy_and_words_that_there_are(kind):
    whole = failure(rank=0, exit_code=1, signal="SIGKILL", message="m", last_lines=("trainer: x",))
    known = {*whole.words(), "killed"}
    assert (kind.sentence is None) == (kind.remedy is None)
    for template, more in ((kind.sentence, ()), (kind.reason, ("divisor",))):
        asked = {name for _, name, _, _ in string.Formatter().parse(template or "") if name}
        assert asked <= known | {*more}
