"""`make plan` without a run: real guards, links and processes, a stand-in for torch and the
trainer."""

import contextlib
import io
import json
import os
import re
import subprocess

import pytest

from contract.errors import UserError
from launcher import cli, errand, folders, measure
from launcher.look import OpenMachines
from launcher.participants import Participants
from launcher.plan.checks import ReadyRun
from launcher.watch.attempts import Outcome
from launcher.watch.failures import Failure
from report.__main__ import main as report_main
from tests.unit.launcher.launcher_values import facts, needs
from tests.unit.report.report_runs import RunBuilder

pytestmark = pytest.mark.usefixtures("settles_soon")
# A rank of the trainer, whose records are in this folder.
RECORDED = """
import json, os, shutil, sys
out, name = os.environ["TANDEM_OUTPUT"], os.environ["TANDEM_NODE"]
shutil.copytree({folder!r} + name, out, dirs_exist_ok=True)
"""


def report(words):
    """`python -m report plan` in this process, which has imported it already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = report_main(["plan", "--runs", str(folders.RUNS), *words])
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.fixture
def cluster(tmp_path, monkeypatch, local_hosts):
    """cluster(script) makes two machines, at two addresses of this one; it returns their number of
    times that they were taken."""
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    monkeypatch.setattr("launcher.measure.STREAM", {"seconds": 0.1, "settle": 0.0})
    monkeypatch.setattr(measure, "run_report_plan", report)
    taken = []

    def make(script):
        hosts = local_hosts(script, (1, 2))
        # Tests of this file may run in several processes at once.
        first = 29400 + 3 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        ports = [first, first + 1, first + 2]
        found = {
            one.name: facts(n, machine="one", interfaces={}, free_ports=ports)
            for n, one in enumerate(hosts, 1)
        }

        def check(options, terminal, place):
            taken.append(options)
            nodes = {one.name: one.engine.node(one) for one in hosts}
            machines = OpenMachines(hosts, nodes, found)
            return ReadyRun(needs(options), machines, Participants(hosts, options))

        monkeypatch.setattr(measure.inventory, "load", lambda _: hosts)
        monkeypatch.setattr(measure, "check_machines", check)
        return taken

    return make


def plan(*words):
    # This machine may be training, or have these tests twice.
    return cli.main(["plan", "--force", "--model", "resnet50", *words])


def test_machines_are_measured_once_and_the_plan_says_what_was_seen(cluster, capsys, tmp_path):
    taken = cluster(RECORDED.format(folder=f"{tmp_path}/of-"))
    for number in (1, 2):  # which takes twice as long for a step
        folder, step = tmp_path / f"of-node{number}", {"backward": 0.08 * number}
        RunBuilder(folder, nodes=1, steps=5, epochs=1, step=step).write_rank(0, f"node{number}")
    assert plan("--batch", "32") == 0
    out = capsys.readouterr().out
    assert "tandem: measuring 2 machines: the links between them, then 15 s of resnet50" in out
    assert "a step took 0.13 s (node1) to 0.21 s (node2)" in " ".join(out.split())
    assert "Links: " in out and "Best exact (=)" in " ".join(out.split())
    assert (tmp_path / "runs/plan-resnet50-2n.json").exists()
    (folder,) = (tmp_path / "runs/measured").iterdir()
    told = json.loads((folder / "plan.json").read_text())
    assert told["data"] == ""
    assert told["options"]["trainer"] == ["--config", "{}", "--trial", "15"]
    ports = set()
    for node in told["nodes"]:
        argv = node["argv"]
        assert argv[1:3] == ["-m", "launcher.node.pairprobe"]
        assert {"--nnodes=1", f"--master_addr={node['address']}"} < {*argv}
        assert json.loads(argv[-1])["trial"] == 15 and "data" not in json.loads(argv[-1])
        ports |= {word for word in argv if word.startswith("--master_port")}
    assert len(ports) == 2  # they share a machine here
    assert "resnet50" not in {path.name for path in (tmp_path / "runs").iterdir()}
    assert not (tmp_path / "runs/latest").exists()

    assert plan("--batch", "32") == 0  # nobody is taken for what is known
    assert len(taken) == 1 and "Measured at" in capsys.readouterr().out
    assert plan("--measure", "--link", "fast") == 2  # said before, not after
    assert plan("--batch", "64", "--nodes", "3") == 2  # only two are there
    assert len(taken) == 1 and "NODES=3" in capsys.readouterr().err


def test_an_earlier_run_serves_without_any_machine(cluster, capsys, tmp_path, monkeypatch):
    taken = cluster("")

    def load(_):
        raise UserError("inventory.ini is missing.")

    monkeypatch.setattr(measure.inventory, "load", load)
    assert plan() == 2
    assert "inventory.ini is missing." in capsys.readouterr().err
    RunBuilder(tmp_path / "runs/20261122T130000Z-resnet50-4n").write()
    assert plan() == 0
    assert "In run 20261122T130000Z-resnet50-4n, a step" in capsys.readouterr().out
    assert not taken


def test_a_list_of_machines_that_is_of_no_use_is_said_whatever_ran_before(capsys, tmp_path):
    RunBuilder(tmp_path / "runs/20261122T130000Z-resnet50-4n").write()
    assert plan("--inventory", str(tmp_path / "nosuch.ini")) == 2
    assert "nosuch.ini does not exist" in capsys.readouterr().err


def test_what_fails_on_a_machine_is_said_and_nothing_is_predicted(cluster, capsys, tmp_path):
    cluster("import sys; print('trainer: no such model', file=sys.stderr); sys.exit(2)")
    assert plan() == 2
    told = capsys.readouterr()
    said = "tandem: it could not be measured: node1, rank 0: trainer: no such model: correct this"
    assert told.err.replace("node2", "node1").startswith(said)
    assert len(told.err.splitlines()) == 1
    assert "x one" not in told.out and not list((tmp_path / "runs").glob("plan-*"))
    (folder,) = (tmp_path / "runs/measured").iterdir()
    assert json.loads((folder / "attempts.json").read_text())["status"] == "failed"


def test_a_link_that_cannot_be_measured_is_said(cluster, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.measure.PATIENCE", 0.5)
    real = measure.make_rounds

    def nobody_begins(names, name):
        return [{**turn, "first": False} for turn in real(names, name)]

    monkeypatch.setattr("launcher.measure.make_rounds", nobody_begins)
    cluster("")
    assert plan() == 2
    (told,) = capsys.readouterr().err.splitlines()
    # Time is up for one of them first, and its partner sees the connection close.
    assert re.search(r"could not be measured with (node[12]|the machine before it)", told)
    assert told.endswith("launch.log.")
    assert not list(tmp_path.rglob("links.json"))


def test_a_machine_that_another_run_took_first_is_waited_for_if_asked(
    cluster, capsys, monkeypatch, tmp_path
):
    """And what was known before is measured again, if that is asked for; a stop is no figure."""
    taken = cluster("")
    RunBuilder(tmp_path / "runs/20261122T130000Z-resnet50-4n").write()
    busy = Failure(host="node2", source="busy", order=0, message="it is in use by anna@desk: run r")
    outcomes = [Outcome("failed", busy, 0.0, [], {})] * 2 + [Outcome("stopped", None, 0.0, [], {})]
    monkeypatch.setattr(errand, "watch_guards", lambda *_: outcomes.pop(0))
    monkeypatch.setattr("launcher.participants.time.sleep", lambda _: None)
    assert plan("--measure") == 2
    assert "anna@desk: run r: wait with QUEUE=1" in capsys.readouterr().err
    assert len(taken) == 1
    assert plan("--queue", "--measure") == 2
    said = capsys.readouterr()
    assert "waiting: node2" in said.out and "stopped before it could be measured" in said.err
    assert len(taken) == 3


@pytest.mark.parametrize(
    ("words", "data"), [((), "digits"), (("--", "--model", "resnet50"), ""), (("--data", "x"), "x")]
)
def test_noise_is_for_a_model_that_was_named_without_images(monkeypatch, words, data):
    seen = []
    monkeypatch.setattr(measure, "plan", lambda options, words, anew: seen.append(options) or 0)
    assert cli.main(["plan", *words]) == 0
    assert seen[0].data == data


def test_on_paper_no_machine_is_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(measure, "plan", None)
    assert cli.main(["plan", "--gpu", "2080ti", "--model", "resnet50", "--nodes", "2"]) == 0
    assert "One 2080ti: 526 images/s" in capsys.readouterr().out
    assert cli.main(["plan", "--gpu", "voodoo2"]) == 2
    assert "voodoo2: Tandem knows" in capsys.readouterr().err
