"""What is reported about runs, whatever the state of their files."""

import fcntl
import json
import os
import socket

import pytest

from contract.errors import UserError
from launcher import control, folders, status, top
from launcher.watch import attempts


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name, plan, attempts) -> its folder."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)

    def run(name, plan, told=None):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(plan)
        if told is not None:
            (folder / "attempts.json").write_text(told)
        return folder

    return run


ODD = "\x1b]0;title\x07\ud800"


@pytest.mark.parametrize("value", [ODD, [ODD], 10**400, None], ids=lambda value: str(value)[:9])
def test_what_a_run_s_files_hold_tells_the_terminal_nothing(run, capsys, value):
    """A run's folder may be somebody else's."""
    odd = dict.fromkeys(("attempt", "status", "nodes", "reason", "first_cause"), value)
    told = {"status": value, "attempts": [odd, {**odd, "nodes": [ODD], "reason": ODD}]}
    plan = json.dumps({"nodes": value, "options": value})
    folder = run(f"20260101T000000Z-{ODD[:-1]}-2n", plan, json.dumps(told))
    (folder / "summary.json").write_text(json.dumps({"final_top1": value}))
    assert control.list_runs() == status.status(folder.name) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_a_controller_on_another_machine_is_not_killed_here(run, monkeypatch):
    """runs/ may lie on a share: the number is then that of somebody else's process here."""
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    held = folders.lock(folder)
    (folder / "controller.pid").write_text(f"{os.getpid()} pc7 1\n")
    monkeypatch.setattr(control.os, "kill", lambda *_: pytest.fail("killed"))
    with pytest.raises(UserError, match="is pc7: type `make stop RUN="):
        control.stop(folder.name)
    held.close()


def test_whoever_holds_a_lock_makes_no_run_of_a_pid_that_is_another_s_now(run, monkeypatch):
    """Any user who can read a file can lock it, for ever."""
    folder = run("20260101T000000Z-resnet18-2n", "{}", json.dumps({"status": "finished"}))
    path = folder / "controller.pid"
    path.touch(0o644)  # as of before
    folders.lock(folder).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(f"{os.getpid()} {socket.gethostname()} 1\n")
    monkeypatch.setattr(control.os, "kill", lambda *_: pytest.fail("killed"))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert control.read_state(folder) == "finished"
        with pytest.raises(UserError, match="is not running"):
            control.stop(folder.name)


def test_what_another_user_s_run_says_is_its_controller_is_not_killed(run, monkeypatch):
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    held = folders.lock(folder)
    monkeypatch.setattr(control.os, "getuid", lambda: os.geteuid() + 1)
    monkeypatch.setattr(control.os, "kill", lambda *_: pytest.fail("killed"))
    with pytest.raises(UserError, match="belongs to another user"):
        control.stop(folder.name)
    held.close()


def test_a_plan_is_its_owner_s_alone(tmp_path):
    attempts.write_json(tmp_path / "plan.json", {"git_diff": "secret"}, mode=0o600)
    attempts.write_json(tmp_path / "attempts.json", {})
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_status_shows_attempts_causes_and_the_last_line_of_each_rank(run, capsys):
    attempt = {"attempt": 1, "status": "failed", "nodes": ["node1", "node2"]}
    attempt.update(reason="first attempt", first_cause={"message": "node2 ran\x1b[2J out"})
    document = json.dumps({"status": "failed", "attempts": [attempt]})
    folder = run("20260101T000000Z-resnet18-2n", "{}", document)
    for rank, text in ((9, "nine\n\n"), (10, "x" * 9000 + "\nten\n")):
        path = folder / f"nodes/node{rank}/rank{rank}.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert status.status(folder.name) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"run {folder.name}: failed\n  attempt 1, failed")
    assert "attempt 1, failed: node1, node2: first attempt" in said
    assert "node2 ran" in said and "\x1b" not in said
    assert said.splitlines()[-3:-1] == ["  [node9 9] nine", "  [node10 10] ten"]
    assert said.splitlines()[-1].startswith("tandem: between runs, `make top` and `make check`")


def test_a_run_that_is_over_is_not_stopped(run):
    done = json.dumps({"status": "finished", "attempts": []})
    folder = run("20260101T000000Z-resnet18-2n", "{}", done)
    with pytest.raises(UserError, match="is not running; its state is `finished`"):
        control.stop(folder.name)


def test_attach_shows_a_foreign_run_s_log_without_orders_for_the_terminal(run, capfd):
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    (folder / "controller.log.first").write_text("zero\n" * 5000)
    (folder / "controller.log").write_text(f"one{ODD[:-1]}\x1b[2J\n{'x' * 70_000}\x1b[2Jend")
    assert control.attach(folder.name) == 0
    said = capfd.readouterr().out
    assert said == "zero\n" * 5000 + f"one\n{'x' * 70_000}end"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_lies_in_a_foreign_run_s_folder_is_not_waited_for(run, make):
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    (folder / "nodes/node1").mkdir(parents=True)
    names = ("controller.pid", "attempts.json", "summary.json", "nodes/node1/rank0.log")
    for name in (*names, "nodes/node1/rank0.1.steps.jsonl", "controller.log"):
        make(folder / name)
    assert control.list_runs() == status.status(folder.name) == 0
    assert top.tail(folder, 5) == [] and not attempts.Attempts.has_checkpoint(folder)
    with pytest.raises(UserError, match=r"controller.log cannot be shown: "):
        control.attach(folder.name)
    with pytest.raises(UserError, match=r"attempts.json is damaged \(it "):
        attempts.Attempts(folder)


def test_nothing_is_written_through_links_of_a_foreign_run_s_folder(run, tmp_path):
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    (tmp_path / "mine").write_text("mine")
    (folder / "controller.pid").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"controller.pid cannot be written"):
        folders.lock(folder)
    assert (tmp_path / "mine").read_text() == "mine"


def test_attach_shows_what_was_said_and_ends_with_the_run(run, capfdbinary):
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    log = folder / "controller.log"
    log.write_text("one\n")
    held = folders.lock(folder)

    def look(seconds):
        """While it follows: the log is rotated, then the controller ends."""
        log.rename(folder / "controller.log.1")
        log.write_text("two\n")
        held.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control.time, "sleep", look)
        assert control.attach(folder.name) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\n"


LAUNCHER = """
import sys
from contract.result_lines import result_line
print("a sentence, whatever its words", *sys.argv[1:])
print(result_line({}), end="")
"""


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ('run="20260101T000000Z-a-2n"', "`make stop RUN=20260101T000000Z-a-2n` ends it"),
        ('waits="until 19:00"', "detached as process "),
        ('refused="x"', ""),
    ],
)
def test_a_detached_launcher_is_left_when_its_result_line_says_so(
    run, tmp_path, monkeypatch, capsys, facts, said
):
    run("20260101T000000Z-a-2n", "{}")
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/__init__.py").touch()
    (tmp_path / "launcher/__main__.py").write_text(LAUNCHER.format(facts))
    monkeypatch.setattr(control, "CHECKOUT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(folders.CHECKOUT))
    assert control.detach(["train", "DETACH=1", "NODES=2"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "a sentence, whatever its words train NODES=2"
    assert len(rest) == bool(said) and said in "".join(rest)
