"""What the command line understands, and what it says when it cannot."""

import json
import os

import pytest

from lab import __main__ as cli
from lab import life, shell


@pytest.fixture
def as_root(monkeypatch):
    monkeypatch.setattr(shell, "missing_tools", lambda vm: [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shell, "missing_tools", lambda vm: [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["up"]) == 1
    said = capsys.readouterr().err
    assert said == "lab: the lab boots machines, which needs root: run it with sudo\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["status"], "there is no lab nowhere: python -m lab up"),
        (["up", "--nodes", "0"], "1 to 64 nodes, not 0"),
        (["up", "--name", "../up"], "lab name '../up'"),
        (["up", "--rate", "fast"], "rate 'fast'"),
        (["up", "--vm", "--rate", "1gbit"], "they have no rate"),
        (["up", "--nodes", "3", "--release", "bookworm,bullseye"], "2 releases for 3 nodes"),
        (["up", "--with", "gcc,--foreign"], "not the name of a Debian package"),
        (["up", "--memory", "1024"], "for virtual machines"),
    ],
)
def test_bad_input_is_a_sentence(as_root, monkeypatch, tmp_path, capsys, argv, sentence):
    monkeypatch.setattr(life, "STATE", tmp_path)
    monkeypatch.setattr(cli, "make_bundle", lambda lab: None)
    monkeypatch.setattr(life, "up", lambda lab: pytest.fail("machines were booted"))
    assert cli.main([argv[0], "--name", "nowhere", *argv[1:]]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_down_all_ends_the_labs_of_this_checkout_alone(as_root, monkeypatch, tmp_path):
    monkeypatch.setattr(life, "STATE", tmp_path)
    for name, checkout in (("a", cli.CHECKOUT), ("b", tmp_path), ("c", cli.CHECKOUT)):
        (tmp_path / name).mkdir()
        saved = json.dumps({"name": name, "checkout": str(checkout), "count": 1})
        (tmp_path / name / "lab.json").write_text(saved)
    ended = []
    monkeypatch.setattr(life, "down", ended.append)
    assert cli.main(["down", "--all"]) == 0
    assert ended == ["a", "c"]
