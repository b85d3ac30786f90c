"""`tandem`, the command for whoever sits at a PC that trains in others' time."""

import contextlib
import os
import pwd
import socket
import subprocess
import sys

import jinja2
import pytest

from launcher.machines.owned import AWAY
from launcher.node import machine_lock
from tests.unit.ansible.provision_machines import ROOT, load

FILES = ROOT / "ansible/roles/owner/files"
TEXT = ROOT / "ansible/roles/owner/templates/owner.txt.j2"
ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def tandem(tmp_path, monkeypatch):
    module = load("ansible/roles/owner/files/tandem.py")
    assert str(module.AWAY) == AWAY
    monkeypatch.setattr(module, "AWAY", tmp_path)
    monkeypatch.setattr(module, "TEXT", TEXT)
    return module


@pytest.fixture
def others(tandem, monkeypatch):
    """Files belong to whom their names tell: tests have one user."""
    monkeypatch.setattr(tandem, "owner", lambda path: path.name)


def test_no_is_said_and_taken_back_by_whoever_said_it(tandem, tmp_path, capsys):
    assert tandem.main(["away"]) == tandem.main(["away"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [ME]
    assert "no run uses this PC until you type `tandem back`." in capsys.readouterr().out
    assert tandem.main(["back"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "may use this PC again" in capsys.readouterr().out
    assert tandem.main(["back"]) == 0
    assert "You had not said no." in capsys.readouterr().out


def promised(**words):
    made = jinja2.Environment(trim_blocks=True).from_string(TEXT.read_text())
    return " ".join(made.render(owner_contact="Anna, room 2417", **words).split())


@pytest.mark.parametrize("hours", [{}, {"hours": "19:00-07:30,sat"}])
def test_each_owner_is_promised_what_holds_there(hours):
    """With hours= alone nobody looks whether somebody is there."""
    yields, alone = promised(owner="yields", idle_minutes=3, **hours), promised(hours="sat")
    assert "When you come, by a key" in yields and "3 minutes" in yields
    assert "When you come" not in alone and "goes on while you work here" in alone
    assert ("19:00-07:30,sat." in yields) is bool(hours) and "hours alone: sat." in alone
    assert yields.endswith("Anna, room 2417.") and alone.endswith("Anna, room 2417.")


def test_another_person_s_no_stays(tandem, others, tmp_path, capsys):
    (tmp_path / "berta").touch()
    tandem.main(["away"])
    tandem.main(["back"])
    assert (
        "berta also typed `tandem away`: only that user or root can type `tandem back`."
        in capsys.readouterr().out
    )
    assert [path.name for path in tmp_path.iterdir()] == ["berta"]


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_another_has_put_under_one_s_name_is_left_alone(tandem, tmp_path, monkeypatch, kind):
    """It is neither opened, which waits for ever at a pipe, nor followed, nor a no of one's own."""
    there, victim = tmp_path / ME, tmp_path.parent / "victim"
    make = {"link": lambda: there.symlink_to(victim), "pipe": lambda: os.mkfifo(there)}
    make.get(kind, there.touch)()
    monkeypatch.setattr(tandem, "owner", lambda path: "berta" if path == there else ME)
    assert tandem.main(["away"]) == tandem.main(["away"]) == 0
    (mine,) = set(tmp_path.iterdir()) - {there}
    assert not victim.exists() and mine.is_file()
    assert tandem.main(["back"]) == 0
    assert list(tmp_path.iterdir()) == [there]


def test_where_nobody_can_say_no_that_is_said(tandem, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tandem, "AWAY", tmp_path / "missing")
    assert tandem.main(["away"]) == 1
    assert "ask the person who set up Tandem on this PC" in capsys.readouterr().err


def test_thousands_of_names_are_counted_in_a_moment(tandem, tmp_path, capsys):
    """Any user may take any name."""
    names = [f"\0tandem/{os.getpid()}/run-{number}/anna" for number in range(500)]
    with contextlib.ExitStack() as stack:
        for name in names:
            mark = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            mark.bind(name)
        calls, output = [], tandem.output
        tandem.output = lambda argv: calls.append(argv) or output(argv)
        assert tandem.main(["who"]) == 0
    said = capsys.readouterr().out
    assert len(calls) == 1 and said.count("trains on it") == tandem.RUNS_LISTED
    assert " more users claim to train on it.\n" in said


@pytest.mark.parametrize("name", [b"\xff", b"\x1b[2J", b"berta"])
def test_a_file_s_name_is_nobody_s_word(tandem, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("LOGNAME", "berta")
    (tmp_path / os.fsdecode(name)).symlink_to(tmp_path / "nowhere")
    assert tandem.main(["who"]) == 0
    assert f"{ME} typed `tandem away` on " in capsys.readouterr().out


def test_who_uses_it_since_when_and_how_to_say_no(tandem, others, tmp_path, capsys):
    name = f"\0tandem/{os.getpid()}/run-7/anna@office"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        mark.bind(name[: machine_lock.LONGEST])
        assert tandem.main(["who"]) == 0
    said = capsys.readouterr().out
    assert "anna@office trains on it since " in said and "(run run-7).\n" in said
    assert "tandem away     not now: training leaves this PC" in said
    (tmp_path / "berta").touch()
    tandem.main(["who"])
    assert "berta typed `tandem away` on " in capsys.readouterr().out


def sessions(monkeypatch, tandem, **changes):
    session = {"Seat": "seat0", "Class": "user", "Name": "anna", "Desktop": "GNOME", **changes}
    shown = "\n".join(f"{name}={value}" for name, value in session.items())
    answers = {"list-sessions": "2 1000 anna seat0", "show-session": shown}
    monkeypatch.setattr(tandem, "output", lambda argv: answers[argv[1]])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"IdleSinceHint": "1764000000000000"}, "anna's GNOME reports to systemd-logind"),
        ({"IdleSinceHint": "0", "Desktop": ""}, "anna's session has not reported"),
        ({"Seat": ""}, "Nobody is logged in at a screen"),
    ],
)
def test_whether_the_desktop_tells(tandem, monkeypatch, capsys, changes, said):
    sessions(monkeypatch, tandem, **changes)
    assert tandem.main(["desktop"]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_what_it_does_not_know_is_answered_by_what_it_does():
    command = [sys.executable, "-IB", str(FILES / "tandem.py")]
    asked = subprocess.run([*command, "go"], capture_output=True, text=True)
    assert (asked.returncode, asked.stderr.count("tandem away: nobody may train here")) == (2, 1)
    assert subprocess.run([*command, "help"], capture_output=True).returncode == 0
