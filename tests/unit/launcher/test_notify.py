"""NOTIFY: what its command gets, and that nothing that becomes of it is the run's."""

import io
import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import notify, run
from launcher.notify import Facts, Notify
from launcher.terminal import Terminal

RECORD = """
import json, os, sys
told = {name: value for name, value in os.environ.items() if name.startswith("TANDEM_")}
with open(sys.argv[1], "a") as file: print(json.dumps([sys.argv[2:], told]), file=file)
"""


@pytest.fixture
def record(tmp_path):
    """The beginning of a command that notes its words and environment, and what it noted."""
    (tmp_path / "record.py").write_text(RECORD)
    noted = tmp_path / "noted"
    command = shlex.join([sys.executable, str(tmp_path / "record.py"), str(noted)])
    return command, lambda: list(map(json.loads, noted.open())) if noted.exists() else []


ENDED = Facts("r", "finished")


def send(command, facts=ENDED):
    terminal = Terminal(said := io.StringIO())
    Notify(command, terminal).send(facts)
    terminal.drain()
    return said.getvalue()


def test_what_machines_say_is_one_word_and_no_command(record, tmp_path):
    command, noted = record
    evil = f'$(touch {tmp_path}/a); touch {tmp_path}/b\n"quoted" `touch {tmp_path}/c` \\ \x1b]0;x\7'
    said = send(
        command + """ {run}:{why} {top1} '{"text": "{why}"}'""", Facts("r", "failed", why=evil)
    )
    ((words, told),) = noted()
    assert said == "" and not [name for name in "abc" if (tmp_path / name).exists()]
    assert words[:2] == [f"r:{told['TANDEM_WHY']}", "-"]
    assert json.loads(words[2])["text"] == told["TANDEM_WHY"]
    send(f"sh -c 'echo \"$TANDEM_WHY\" >{tmp_path}/told'", Facts("r", "failed", why=evil))
    assert (tmp_path / "told").read_text() == told["TANDEM_WHY"] + "\n"
    assert not [name for name in "abc" if (tmp_path / name).exists()]


@pytest.mark.parametrize("why", ["x' -A /etc/passwd '", "@/etc/passwd", "--"])
def test_what_machines_say_ends_no_quote_and_is_neither_option_nor_file(record, why):
    command, noted = record
    send(command + """ {why} 'text={why}' '["{why}"]'""", Facts("r", "failed", why=why))
    (((alone, text, document), told),) = noted()
    assert alone == "-" or ("'" not in alone and alone[0] not in "-@")
    assert [alone] == [text.removeprefix("text=")] == json.loads(document) == [told["TANDEM_WHY"]]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("echo no route >&2; exit 6", "failed with exit code 6 (no route)"),
        ("kill -9 $$", "failed with exit code -9"),
        ("sleep 600 & echo $! >pid; wait", "did not end within 0 s and was killed"),
    ],
)
def test_what_goes_wrong_is_a_line(script, line, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.4)
    monkeypatch.setattr(notify, "CHECKOUT", tmp_path)
    assert send(f"sh -c '{script}'") == f"tandem: NOTIFY: sh {line}: perhaps nobody was notified\n"
    if (tmp_path / "pid").exists():  # what it had started is gone as well
        stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
        limit = time.monotonic() + 20
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < limit


def test_a_program_that_is_gone_by_then_is_a_line(tmp_path):
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = Notify(str(program), terminal := Terminal(said := io.StringIO()))
    program.unlink()
    command.send(ENDED)
    terminal.drain()
    assert "could not be started (No such file or directory)" in said.getvalue()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("mail -s 'x", "a quote is not closed"),
        ("sh {top5}", "{top5} does not exist: use {run}, {status}, {top1}"),
        ("no-such-program {run}", "the control node has no program no-such-program"),
        ("sh -c 'mail -s \"{why}\" anna'", "sh would run {why} as code"),
        ("env A=b /bin/bash -lc 'echo {top1}'", 'write "$TANDEM_TOP1" instead'),
        ("ssh anna@pc1 notify-send {why}", "ssh would run {why} as code"),
    ],
)
def test_what_can_never_work_is_refused_before_anything_begins(command, why, monkeypatch):
    monkeypatch.setattr(run, "check_machines", None)
    with pytest.raises(UserError, match="NOTIFY.*" + re.escape(why)):
        run.train(Config(notify=command))


@pytest.mark.parametrize("waited", [True, False])
def test_a_refusal_is_told_of_where_nobody_need_be_there_to_read_it(record, monkeypatch, waited):
    command, noted = record

    def once(_options, _terminal, turn):
        turn.waited = "resnet18 on 4 machines" if waited else ""
        raise UserError("pc3: its disk is full: make room.")

    monkeypatch.setattr(run, "check_machines", once)
    with pytest.raises(UserError, match="disk is full"):
        run.train(Config(notify=command))
    told = [facts["TANDEM_WHY"] for _, facts in noted()]
    assert told == ["pc3: its disk is full: make room."] * waited


def test_the_lines_of_the_page_are_commands(record, monkeypatch):
    command, noted = record
    page = Path(__file__).parents[3] / "docs/launcher.md"
    lines = re.findall('^(?:make train )?(NOTIFY="curl .*)', page.read_text(), re.MULTILINE)
    for line in lines:
        ((_, words),) = (word.split("=", 1) for word in shlex.split(line))
        send(words.replace("curl", command, 1), Facts("r", "failed", why='"no"'))
        words = noted()[-1][0]
        assert "r: failed" in words[-1]
        assert words[-2] == "--data-urlencode" or json.loads(words[-1])
    assert len(lines) == 3
