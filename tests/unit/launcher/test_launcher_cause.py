"""Which failure came first, and what is said about it."""

import time

import pytest

from launcher.cause import PEER_LOST, Failure, document, first_of

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.3]:4711"


def failure(host="node1", kind="worker", order=0, **fields):
    return Failure(host=host, kind=kind, order=order, **fields)


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
        failure("node4", kind="gone", order=1, message="no heartbeat for 15 s"),
    ]
    assert first_of(told).host == "node4"


def test_a_workers_own_error_explains_its_launch():
    told = [
        failure("node1", kind="launch", order=0, exit_code=1),
        failure("node1", order=1, rank=0, exit_code=3),
    ]
    assert first_of(told).kind == "worker"


def test_on_one_node_the_guard_knows_the_first():
    told = [
        failure(order=0, rank=0, exit_code=1, first_on_node=False),
        failure(order=1, rank=1, signal="SIGKILL"),
    ]
    assert first_of(told).rank == 1


def test_a_signal_is_no_lost_peer_whatever_was_printed_before():
    assert not failure(rank=0, signal="SIGKILL", last_lines=(PEER,)).peer_lost


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
