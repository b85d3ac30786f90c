"""What a machine finds out about its owner, and that its guard tells it. Stand-ins: what loginctl
and nvidia-smi print, a folder in the place of /proc, and for the owner's word a folder of files."""

import contextlib
import os
import signal

import pytest

from launcher.machines.owned import SIGNS
from launcher.node import owner
from launcher.node.processes import PROC, descendants
from tests.unit.launcher.guard_client import workers

GNOME = {"Seat": "seat0", "Class": "user", "Active": "yes", "IdleHint": "no", "LockedHint": "no"}


@pytest.mark.parametrize(
    ("changes", "here"),
    [
        ({}, True),
        ({"IdleHint": "yes"}, False),
        ({"LockedHint": "yes"}, False),
        ({"LockedHint": None}, True),  # an old logind
        ({"Active": "no"}, False),  # another user's desktop is in front
        ({"Class": "greeter"}, False),
        ({"Seat": ""}, False),  # by ssh
    ],
)
def test_who_sits_there(changes, here):
    told = {name: value for name, value in {**GNOME, **changes}.items() if value is not None}
    assert owner.is_at_seat(told) is here


def test_all_sessions_are_asked_at_once():
    asked = []

    def loginctl(argv):
        asked.append(argv)
        if "list-sessions" in argv:
            return "     2 1000 anna seat0 tty2\n    c1  120 gdm  seat0 tty1\n\n"
        anna = "Seat=seat0\nClass=user\nActive=yes\nIdleHint=no\nLockedHint=yes\n"
        return f"{anna}\nSeat=seat0\nClass=greeter\n"

    assert owner.sessions(loginctl) == [
        {**GNOME, "LockedHint": "yes"},
        {"Seat": "seat0", "Class": "greeter"},
    ]
    assert asked[1][:4] == ["loginctl", "show-session", "2", "c1"]
    assert owner.sessions(lambda _argv: "") == []


def test_a_command_that_is_missing_or_hangs_says_nothing(monkeypatch):
    monkeypatch.setattr(owner, "COMMAND_SECONDS", 0.2)
    assert owner.output(["tandem-no-such-command"]) == ""
    assert owner.output(["sleep", "60"]) == ""


PMON = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       2210      G      2      1      -      -    Xorg
    0       3120      G     35     12      -      -    blender
    0       4000      C     90     40      -      -    python
    1          -      -      -      -      -      -    -
"""


def test_programs_that_use_a_card():
    assert owner.gpu_pids(lambda _argv: PMON) == [3120, 4000]
    assert owner.gpu_pids(lambda _argv: "") == []


def test_the_system_and_the_user_that_trains_are_nobody(monkeypatch):
    monkeypatch.setattr(owner.os, "getuid", lambda: 1001)
    users = (0, 120, 65534, 61184, 1001, 1000, 1234567890)
    assert [owner.is_other_person(user) for user in users] == [False] * 5 + [True] * 2


def test_others_count_by_what_they_have_of_the_processors(monkeypatch):
    clock, had = [0.0], [{}]
    monkeypatch.setattr(owner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(owner, "processor_seconds", lambda: dict(had[0]))
    signs = owner.Signs(["processors"], "/nowhere")
    found = []
    for second in range(0, 60, 2):  # a job of 20 s that takes a whole processor
        clock[0] = float(second)
        had[0] = {("7", "1"): 100.0 + min(20, max(0, second - 10)), ("8", "1"): second / 100}
        found.append(signs.find())
    busy = [2 * n for n, sign in enumerate(found) if sign]
    assert busy[0] in (16, 18) and busy[-1] in (32, 34) and set(found) == {"", "processors"}


def test_what_was_spent_before_the_first_look_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(owner, "processor_seconds", lambda: {("7", "1"): 1e6})
    signs = owner.Signs(["processors"], "/nowhere", window=0.0)
    assert [signs.find(), signs.find()] == ["", ""]


def test_only_what_is_agreed_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "sessions", lambda: [GNOME])
    assert owner.Signs(["asked"], str(tmp_path)).find() == ""
    assert owner.Signs(list(SIGNS), str(tmp_path)).find() == "seat"
    (tmp_path / "anna").touch()
    assert owner.Signs(["asked"], str(tmp_path)).find() == "asked"
    assert list(owner.CHECKS) == list(SIGNS)


def looker(guard):
    """The process of this guard's that looks for the owner, by its pid."""
    for pid in descendants(guard):
        with contextlib.suppress(OSError):
            if b"owner.stream(" in (PROC / str(pid) / "cmdline").read_bytes():
                return pid
    return None


def test_a_machine_whose_owner_nobody_can_look_for_is_left(guards, tmp_path):
    """The process that looks is started again once: its second end counts as a sign."""
    away = tmp_path / "away"
    away.mkdir()
    guard = guards()
    launch = workers("import time; time.sleep(60)")
    guard.start(tmp_path, launch, owner_signs=["asked"], away_dir=str(away), beat=0.1)
    guard.wait_for("started")
    pid = guard.wait_for("hello")["pid"]
    os.kill(looker(pid), signal.SIGKILL)
    said = guard.wait_for("trouble", what="owner")["message"]
    assert said == "what looked whether its owner is back ended, and begins again"
    (away / "anna").touch()
    guard.wait_for("owner", sign="asked")
    guard.frames.clear()
    os.kill(looker(pid), signal.SIGKILL)
    assert guard.wait_for("trouble")["message"].endswith("is back: it ended twice")
    assert guard.wait_for("owner")["sign"] == "asked"
    guard.frames.clear()
    guard.wait_for("beat")
    assert looker(pid) is None
    guard.send(type="kill")
    end = guard.wait_for("exit")
    assert end["left"] == [] and not any("stream(" in one["command"] for one in end["ended"])
