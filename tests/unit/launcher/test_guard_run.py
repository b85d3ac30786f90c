"""A guard with a stand-in for launch: what it starts, passes on, reports and ends."""

import hashlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from launcher.node import machine_lock
from tests.unit.launcher.guard_client import workers


def test_a_run_is_seen_by_others_while_its_guard_lives(guards, tmp_path, mark):
    run = mark.partition("=")[2]
    guard = guards()
    guard.start(
        tmp_path, workers("print('x'); import time; time.sleep(600)"), run=run, holder="a/b c@d"
    )
    guard.wait_for("started")
    (own,) = [one for one in machine_lock.claims() if one["run"] == run]
    assert 0 <= own.pop("seconds") < 120
    assert own == {"pid": guard.wait_for("hello")["pid"], "run": run, "holder": "a-b-c@d"}
    guard.send(type="kill")
    guard.wait_for("exit")
    guard.process.wait(10)
    assert run not in {one["run"] for one in machine_lock.claims()}


def test_temporary_files_of_ranks_are_theirs_alone_and_go_with_the_guard(guards, tmp_path):
    guard = guards()
    script = (
        "import os, pathlib, tempfile\n"
        "pathlib.Path(tempfile.gettempdir(), 'left').touch()\n"
        "print(tempfile.gettempdir(), oct(os.stat(tempfile.gettempdir()).st_mode & 0o777))"
    )
    guard.start(tmp_path, workers(script))
    guard.wait_for("exit")
    folder, mode = guard.output[0, "stdout"].decode().split()
    assert (Path(folder).name[:7], mode) == ("tandem-", "0o700")
    guard.process.wait(10)
    assert not Path(folder).exists()


def test_bytes_arrive_as_they_were_written(guards, tmp_path):
    guard = guards()
    script = (
        "import os, time\n"
        "os.write(1, b'\\r 10%')\n"
        "time.sleep(0.3)\n"
        "os.write(1, b'\\r 20%|\\xe2\\x96')\n"
        'os.write(2, b\'\\x00\\xff{"type": "exit"}\\n\')\n'
    )
    guard.start(tmp_path, workers(script))
    guard.wait_for_output(b"\r 10%")  # a progress bar must not wait for the end of its line
    guard.wait_for("exit")
    assert guard.output[0, "stdout"] == b"\r 10%\r 20%|\xe2\x96"
    assert guard.output[0, "stderr"] == b'\x00\xff{"type": "exit"}\n'


def test_nothing_is_lost_when_the_reader_is_slow(guards, tmp_path):
    guard = guards()
    size = 40 << 20  # more than the guard keeps: the worker has to wait
    script = f"import os\nfor i in range({size >> 20}): os.write(1, bytes([i]) * (1 << 20))"
    guard.start(tmp_path, workers(script))
    guard.wait_for("hello")
    limit = time.monotonic() + 0.5
    while time.monotonic() < limit:  # nobody reads
        assert resident(guard.frames[0]["pid"]) < 40 << 20
        time.sleep(0.1)
    guard.wait_for("exit")
    expected = b"".join(bytes([i]) * (1 << 20) for i in range(size >> 20))
    found = guard.output[0, "stdout"]
    assert hashlib.sha256(found).digest() == hashlib.sha256(expected).digest()


def resident(pid):
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_the_first_failure_is_named_with_its_own_exit_code(guards, tmp_path):
    guard = guards()
    script = (
        "import os, time\nif int(os.environ['RANK']): os._exit(76)\ntime.sleep(0.4); os._exit(3)"
    )
    env = {"DEAF": "1"}
    guard.start(tmp_path, workers(script, 2), ranks=[0, 1], env=env, fail_grace=10)
    end = guard.wait_for("exit")
    exits = {f["rank"]: f for f in guard.frames if f["type"] == "worker_exit"}
    assert (exits[1]["exit_code"], exits[1]["first"]) == (76, True)
    assert (exits[0]["exit_code"], exits[0]["first"]) == (3, False)
    assert (end["reason"], end["exit_code"]) == ("failed", 1)


def test_a_signal_and_the_exception_of_a_traceback_are_named(guards, tmp_path):
    guard = guards()
    script = "try: 1 / 0\nexcept ZeroDivisionError: raise KeyError('the second one')"
    guard.start(tmp_path, workers(script))
    end = guard.wait_for("exit")["workers"]["0"]
    assert (end["exit_code"], end["exception"]) == (1, "KeyError: 'the second one'")
    guard = guards()
    guard.start(tmp_path, workers("import os; os.killpg(0, 11)"), attempt=2)
    end = guard.wait_for("exit")["workers"]["0"]
    assert end == {"exit_code": None, "signal": "SIGSEGV", "exception": None}
    guard = guards()
    script = "import traceback\ntry: 1 / 0\nexcept ArithmeticError: traceback.print_exc()"
    guard.start(tmp_path, workers(script), attempt=3)
    end = guard.wait_for("exit")["workers"]["0"]
    assert (end["exit_code"], end["exception"]) == (0, "ZeroDivisionError: division by zero")


def test_the_environment_is_the_task_s_and_no_other(guards, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lcoal/lib")
    guard = guards()
    script = "import os, json; print(json.dumps(dict(os.environ)))"
    guard.start(tmp_path, workers(script), ranks=[4], env={"EMPTY": ""})
    guard.wait_for("exit")
    found = json.loads(guard.output[4, "stdout"])
    assert found["EMPTY"] == "" and "LD_LIBRARY_PATH" not in found
    assert (found["TANDEM_NODE"], found["TANDEM_ATTEMPT"]) == ("node1", "1")
    assert float(found["TANDEM_GUARD_MONO"]) == guard.wait_for("exit")["mono_start"]
    inside = ("PYTHON_EXEC", "TANDEM_GUARD_PYTHON", "TANDEM_GUARD_PIPES", "TANDEM_WORKER_PYTHON")
    assert not any(name in found for name in inside)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"argv": ["/opt/no/python"]}, "/opt/no/python: No such file or directory"),
        ({}, "the task for the guard lacks argv"),
    ],
)
def test_a_task_that_cannot_begin_is_one_sentence(guards, tmp_path, task, message):
    guard = guards()
    known = {"run": "r", "attempt": 1, "host": "h", "ranks": [0], "shared": True}
    guard.send(type="start", output=str(tmp_path), **known, **task)
    end = guard.wait_for("exit")
    assert (end["reason"], end["message"]) == ("failed", message)


def test_a_folder_that_cannot_be_written_is_reported_and_ends_nothing(guards, tmp_path):
    (tmp_path / "run").write_text("a file where the run directory should be")
    guard = guards()
    guard.start(tmp_path / "run", workers("print('trained')"), record=True)
    end = guard.wait_for("exit")
    assert end["reason"] == "finished"
    assert guard.wait_for("trouble")["what"] == "output folder"
    assert guard.output[0, "stdout"] == b"trained\n"


AT_HOME = {"peers": ["127.0.0.1"]}
MEETS = """
import os, socket, time
own = socket.create_server(("127.0.0.1", 0))  # as wandb has one, with a process of its own
inside = socket.create_connection(own.getsockname()), own.accept()
if os.environ["RANK"] == "0":
    held = socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_that_meet_no_other_are_named_after_a_while(guards, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        guard = guards()
        options = {"env": {"PORT": str(port)}, **AT_HOME, "meet_within": 1.0, "beat": 0.1}
        guard.start(tmp_path, workers(MEETS, 2), ranks=[0, 1], **options)
        told = guard.wait_for("trouble", what="group")["message"]
    assert told.startswith("rank 1 connected to no other rank within 1 s")


RECEIVES = """
import os, socket, time
with socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))) as held:
    for _ in range(1500):
        held.recv(1000, socket.MSG_WAITALL)
    held.sendall(bytes({}))
    time.sleep(1.2)
"""


@pytest.mark.parametrize("sent", [1000, 100_000])
def test_ranks_that_get_a_model_and_send_no_gradients_are_said_to_train_apart(
    guards, tmp_path, sent
):
    """But by their own words they have finished: they may sum later, or on purpose not at all."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        guard, env = guards(), {"PORT": str(store.getsockname()[1])}
        options = {"env": env, **AT_HOME, "meet_within": 0.3, "beat": 0.1}
        guard.start(tmp_path, workers(RECEIVES.format(sent)), record=True, **options)
        peer, _ = store.accept()
        with peer:
            peer.sendall(bytes(1_500_000))
            while peer.recv(1 << 16):
                pass
        assert guard.wait_for("exit")["reason"] == "finished"
    (file,) = tmp_path.glob("nodes/*/machine.*.jsonl")
    end = json.loads(file.read_text().splitlines()[-1])
    assert ("only_received" in end) == (sent == 1000)


@pytest.mark.parametrize(("meets", "reason"), [("0", "finished"), ("none", "alone")])
def test_ranks_that_all_return_0_and_met_no_other_have_not_finished(
    guards, tmp_path, meets, reason
):
    """One that has met the others once may leave the group and work on by itself."""
    source = MEETS.replace('"0"', repr(meets)).replace("time.sleep(600)", "time.sleep(0.6)\n")
    source = source.replace('print("ready"', 'time.sleep(0.8); held = None; print("ready"')
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        guard = guards()
        options = {"env": {"PORT": str(port)}, **AT_HOME, "meet_within": 0.5, "beat": 0.1}
        guard.start(tmp_path, workers(source), record=True, **options)
        assert guard.wait_for("exit")["reason"] == reason
    (file,) = tmp_path.glob("nodes/*/machine.*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-1].get("alone") == ([0] if reason == "alone" else None)
    assert lines[-1]["peak_memory_bytes"]["0"] > 1 << 20


def test_a_short_run_whose_ranks_met_no_other_ends_with_a_warning(guards, tmp_path):
    guard = guards()
    script = "import time; time.sleep(0.6)"
    guard.start(tmp_path, workers(script), **AT_HOME, meet_within=3.0, beat=0.1)
    told = guard.wait_for("trouble", what="group")["message"]
    assert told.startswith("rank 0 connected to no other rank")
    assert guard.wait_for("exit")["reason"] == "finished"
