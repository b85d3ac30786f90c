"""Files that none of our machines would write: the report is made from the others."""

import json
import os
import threading

import pytest

from report.__main__ import main
from tests.unit.report.report_runs import RunBuilder


def fifo(path):
    os.mkfifo(path)


def zero(path):
    path.symlink_to("/dev/zero")


def deep(path):
    path.write_text('{"a": ' + "[" * 200_000)


def bare_list(path):
    path.write_text('["start"]\n[1]\n3\n')


def lone_surrogate(path):
    path.write_text('{"attempt": 1, "mono": 1.0, "interface": "\\ud800", "kind": "\\udfff"}\n')


@pytest.mark.parametrize("odd", [fifo, zero, deep, bare_list, lone_surrogate])
@pytest.mark.parametrize("name", ["iostat.json", "net.jsonl", "exit.json", "rank0.steps.jsonl"])
def test_an_odd_file_of_a_node_does_not_end_the_report(tmp_path, odd, name):
    run = RunBuilder(tmp_path / "run").write()
    path = run / "nodes/node1" / name
    path.unlink()
    odd(path)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main([str(run)])), daemon=True)
    thread.start()
    thread.join(60)
    assert codes == [0]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", [b"caf\xe9", b"\x1b]0;x\x07", b"a\nb"])
def test_a_folder_whose_name_is_no_text_is_no_host(tmp_path, name):
    run = RunBuilder(tmp_path / "run").write()
    odd = run / "nodes" / os.fsdecode(name)
    odd.mkdir()
    for file in ("rank7.steps.jsonl", "net.jsonl", "exit.json", "iostat.json"):
        text = '{"kind": "start", "attempt": 1, "mono": 1.0, "attempts": [{}]}\n'
        (odd / file).write_text(text)
    assert main([str(run)]) == 0
    assert json.loads((run / "summary.json").read_text())["world_size"] == 4
