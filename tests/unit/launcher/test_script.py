"""A script of the user's own: what is refused, what is sent, and how its processes are started."""

import io
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from boundary.run_files import RunPlan
from contract import runs
from contract.decisions import choose_balance
from contract.errors import OUT_OF_MEMORY, STOPPED, UserError
from contract.options import Config
from launcher import build_script, cli, look, options
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.node import supervisor
from launcher.plan import checks, code, plan, sending
from launcher.problems import refuse_or_warn
from launcher.program import Needs
from launcher.terminal import Terminal
from launcher.watch import failures
from report.rerun import train_line
from tests.unit.launcher.launcher_values import CODE, facts, gpus, host, problems
from tests.unit.report.report_runs import SCRIPT, RunBuilder, change

SOURCE = """
import argparse, os
import torch, pandas
import contract, helpers
try:
    import wandb
except ImportError:
    wandb = None
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a script, and modules of its own beside it."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text(SOURCE)
    (folder / "contract.py").write_text("")
    (folder / "helpers.py").write_text("import yaml\n")
    (folder / "package/__init__.py").write_text("")
    (folder / "package/train.py").write_text("import torch\nimport package.parts\n")
    (folder / "package/parts.py").write_text("import scipy\n")
    code.take_snapshot.cache_clear()
    yield folder
    code.take_snapshot.cache_clear()


def asked(folder, name="train.py", **more):
    typed = name if name.startswith("-m") else str(folder / name)
    own, sent = build_script.resolve_script(typed, str(folder))
    return Config(script=own, folder=sent, data="", **more)


def read(folder, name="train.py", **more):
    return build_script.build(asked(folder, name, **more))


def planned(found, hosts=None, cards=0, data="", **request):
    hosts = hosts or (host(1), host(2))
    known = {one.name: facts(n, gpus=gpus(cards)) for n, one in enumerate(hosts, 1)}
    made = plan.PlanRequest("r", 0.0, Config(data=data), found, CODE, **request)
    return plan.build(list(hosts), known, made)


def test_its_folder_is_its_git_checkout_else_the_one_it_lies_in(project):
    tool = project / "my tools/train it.py"
    tool.parent.mkdir()
    tool.write_text("")
    assert build_script.resolve_script(str(tool), None) == (str(tool), str(tool.parent))
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    assert build_script.resolve_script(str(tool), None) == (str(tool), str(project))
    assert build_script.resolve_script(str(tool), str(tool.parent)) == (str(tool), str(tool.parent))
    ours = inventory.CHECKOUT / "examples/own_script/train.py"
    assert build_script.resolve_script(str(ours), None)[1] == str(ours.parent)  # not all of Tandem
    module = ("-m package.train", str(project))
    assert build_script.resolve_script(*module) == module


def test_a_script_in_a_folder_that_git_ignores_is_sent_with_its_folder(project):
    """And with its checkout. The other rules of git stay as they are."""
    for name in ("scratch/deep/try.py", "scratch/deep/net.py", "scratch/other.bin", "data/big.bin"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / ".gitignore").write_text("scratch/\ndata/\n*.local.py\n")
    (project / "x.local.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    for name, folder in (("scratch/deep/try.py", project), ("try.py", project / "scratch/deep")):
        code.take_snapshot.cache_clear()
        found = read(folder, name)
        beside = {"helpers.py", ".gitignore", "package/parts.py"} if folder == project else set()
        sent = {*sending.current_code(found).files.sent}
        assert beside | {name, name.replace("try", "net")} <= sent
        assert not any(".bin" in name for name in sent)
    code.take_snapshot.cache_clear()
    with pytest.raises(UserError, match=r"does not send x\.local\.py \(ignored by git"):
        read(project, "x.local.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--script", "nowhere.py"], "there is no file"),
        (["--script", "train.py --lr 0.1"], 'Its options belong in ARGS="--lr 0.1"'),
        (["--script", "train.py", "--folder", "package"], "does not contain SCRIPT=train.py"),
        (["--script", "train.py", "--model", "resnet50", "--batch", "32"], "MODEL, BATCH belongs"),
        (["--output", "out"], "OUTPUT works only with your own script"),
        (["--script=-m package.train", "--folder", "package"], "has no such module: set FOLDER="),
        (["--script", "train.py", "--output", "../other"], "is outside the folder"),
        (["--script", "train.py", "--resume-args", "--r {last}"], "set OUTPUT="),
        (["--script", "train.py", "--resume-args", "'"], "a quote is not closed"),
        (["--script", "train.py", "--resume-args", "-r {latest}"], "nothing replaces {latest}"),
        (["--script", "run.sh"], "is a script for /bin/sh"),
        (["--script", "train.py", "--resume-from", "self"], "type RESUME_ARGS="),
        (["--script", "train.py", "--max-restarts", "2"], "RESUME_ARGS='--resume {last}'"),
        (["--script", ".tools/train.py", "--folder", "."], "Tandem does not send "),
        (["--script", "train.ipynb"], "is a notebook"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_machine_is_asked(
    project, monkeypatch, capsys, words, said
):
    def ask(*_, **__):
        raise AssertionError("a machine was asked")

    (project / ".tools").mkdir()
    (project / ".tools/train.py").write_text("")
    (project / "train.ipynb").write_text('{"cells": [null]}')
    (project / "run.sh").write_text("#!/bin/sh\ntrue\n")
    monkeypatch.chdir(project)
    monkeypatch.setattr(inventory, "load", lambda _path: [host(1)])
    monkeypatch.setattr(look, "open_and_probe", ask)
    assert cli.main(["dry-run", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_the_processes_are_started_as_torchrun_starts_them(project):
    found = read(project, words=("--lr", "0.1 2"))
    made = planned(found, cards=2)
    assert made.world_size == 4
    node = made.nodes[1]
    work = f"{node.output}/work/node2"
    assert node.cwd == work
    assert node.argv[-5:] == ("--use_env", "--", "train.py", "--lr", "0.1 2")
    assert "--nproc_per_node=2" in node.argv
    assert "--master_addr=192.0.2.1" in node.argv
    assert node.env["PYTHONPATH"] == f"{work}:{node.code}/library"
    assert "TANDEM_LOCAL_RANK" not in node.env
    assert node.env["TANDEM_RANK_PORT"] not in ("", str(made.master_port))
    other = planned(found, (host(1, env={"PYTHONPATH": "/opt/more"}),)).nodes[0]
    assert other.env["PYTHONPATH"].endswith("/library:/opt/more")
    hosts = [host(1), host(2)]
    machines = OpenMachines(hosts, {}, {one.name: facts(n) for n, one in enumerate(hosts, 1)})
    shown = plan.render(made, machines)
    assert f"folder {project}" in shown and "precision" not in shown


def test_each_attempt_has_two_ports_that_no_other_had():
    """At the old ones a machine that thaws would meet the run."""
    there, used, ports = facts(1, free_ports=list(range(29500, 29532))), set(), []
    for _ in range(8):
        ports += [plan.choose_port(there, None, used), plan.choose_rank_port(there, None, used)]
        used.add(ports[-2])
    assert len({*ports}) == 16


def test_a_module_starts_as_a_module(project):
    found = read(project, "-m package.train")
    assert planned(found).nodes[0].argv[-4:] == ("--use_env", "-m", "--", "package.train")
    assert found.modules == ("scipy", "torch")
    assert found.name == "train"


@pytest.mark.parametrize(
    ("encoding", "first"),
    [("utf-8-sig", ""), ("gbk", "# -*- coding: gbk -*-\n"), ("utf-8", "# coding: pyxl\n")],
)
def test_a_source_is_read_in_its_own_encoding(project, encoding, first):
    """In one that a package of the machines may add, nothing is known of it, nor is it broken."""
    text = first + "# 训练\nimport argparse, pandas\np.add_argument('--local_rank')\n"
    (project / "train.py").write_bytes(text.encode(encoding))
    found = read(project)
    known = () if "pyxl" in first else ("pandas",)
    assert (found.modules, bool(found.env)) == (known, bool(known))


@pytest.mark.parametrize("spelled", ["--local_rank", "--local-rank"])
def test_the_local_rank_is_given_where_the_parser_has_it_as_it_spells_it(project, spelled):
    (project / "helpers.py").write_text(f'p.add_argument("{spelled}", type=int, default=-1)\n')
    assert planned(read(project)).nodes[0].env["TANDEM_LOCAL_RANK"] == spelled
    given = ["-u", "train.py", "--lr", "1"]
    insert = supervisor.insert_local_rank
    assert insert(given, spelled, 3) == [*given[:2], f"{spelled}=3", *given[2:]]
    given = ["-u", "-m", "package.train", "--lr", "1"]
    assert insert(given, spelled, 0) == [*given[:3], f"{spelled}=0", *given[3:]]
    assert insert(given, None, 0) == given


OTHERS = """
import argparse
{}

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()

def evaluate():
    return 1

if __name__ == "__main__":
    {}
"""


@pytest.mark.parametrize(
    ("own", "helpers", "wants"),
    [
        ("# parser.add_argument('--local_rank')\n'add_argument(\"--local_rank\")'", "", False),
        ("from helpers import evaluate\ndef parse(): pass", OTHERS.format("", "parse()"), False),
        ("import helpers", "if __name__ == '__main__': p.add_argument('--local_rank')", False),
        ("from helpers import parse", OTHERS.format("", "pass"), True),
        ("import helpers\nhelpers.parse()", OTHERS.format("", "pass"), True),
        ("from helpers import args", OTHERS.format("args = None", "pass") + "args = parse()", True),
        ("from helpers import Own", "class Base:\n  def a(p): p.add_argument('--local_rank')\n"
         "class Own(Base): pass", True),
        ("if __name__ == '__main__':\n  p.add_argument('-l', '--local_rank', default=0)", "", True),
    ],
)  # fmt: skip
def test_the_local_rank_is_given_to_no_other_program_s_parser(project, own, helpers, wants):
    (project / "train.py").write_text(own)
    (project / "helpers.py").write_text(helpers)
    assert ("TANDEM_LOCAL_RANK" in read(project).env) == wants


def test_what_it_imports_is_asked_of_every_machine_and_named(project):
    found = read(project)
    assert found.modules == ("pandas", "torch", "yaml")  # neither its own modules nor wandb
    hosts = [host(1), host(2)]
    needs = Needs(asked(project), found)
    assert look.make_question(hosts[0], hosts, needs)["packages"] == ("pandas", "torch", "yaml")
    (problem,) = problems(hosts, [facts(1), facts(2, missing=["pandas"])], needs)
    assert (problem.code, problem.labels) == ("imports", ("node2 (192.0.2.2)",))
    assert refuse_or_warn([problem], force=False) == [problem.text]  # it may find them all the same


def test_the_machine_s_python_decides_whether_it_is_python(project):
    (project / "train.py").write_text("import yaml\ndef f(:\n")
    check = planned(read(project)).check
    done = subprocess.run([sys.executable, *check[1:]], cwd=project, capture_output=True, text=True)
    assert done.returncode == 1 and "train.py" in done.stderr and "SyntaxError" in done.stderr
    (project / "train.py").write_bytes(b"# coding: gbk\nprint('\xc4\xe3')\n")
    assert subprocess.run([sys.executable, *check[1:]], cwd=project).returncode == 0


def test_precheck_is_a_command_of_the_shell_with_the_python_of_the_ranks(project):
    command = 'python -c "import sys; print(sys.executable)"; ls {data}; exit $CODE'
    made = planned(read(project, precheck=command), data="/")
    for ended in ("3", "0"):
        argv, env = [sys.executable, *made.check[1:]], {"PATH": "/usr/bin:/bin", "CODE": ended}
        done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True)
        printed = done.stdout.splitlines()
        assert printed[0] == sys.executable and "usr" in printed
        assert bool(done.returncode) == (ended == "3") == ("exit code 3" in printed[-1])
    assert build_script.executed_options(asked(project, precheck="x"))["precheck"] == "PRECHECK=x"


def test_the_path_of_the_data_takes_the_place_of_braces_if_there_are_data(project):
    found = read(project, words=("--root={data}/coco", "{data}"))
    hosts = (host(1, data_root="/a"), host(2, data_root="/b"))
    nodes = planned(found, hosts, data="coco").nodes
    assert [node.argv[-2:] for node in nodes] == [
        ("--root=/a/coco/coco", "/a/coco"),
        ("--root=/b/coco/coco", "/b/coco"),
    ]
    assert nodes[1].env["TANDEM_DATA"] == "/b/coco"
    assert planned(found).nodes[0].argv[-1] == "{data}"


def test_a_later_attempt_goes_on_by_the_scripts_own_way(project):
    more = {"output": "out", "resume_args": "--resume {last} --quiet", "words": ("--lr", "1")}
    found = read(project, **more)
    assert planned(found).nodes[0].argv[-3:] == ("train.py", "--lr", "1")
    later = planned(found, attempt=2, checkpoint="out/step 3.pt").nodes[0].argv
    assert later[-5:] == ("--lr", "1", "--resume", "out/step 3.pt", "--quiet")
    assert planned(found, attempt=2, checkpoint=None).nodes[0].argv[-2:] == ("--lr", "1")


def test_a_run_that_goes_on_is_the_same_script(project):
    began = asked(project, output="out", resume_args="--resume {last}")
    assert build_script.resume_config(began, {"nodes": 1}).nodes == 1
    tonight = build_script.resume_config(began, {"at": "19:00", "until": "07:00"})
    assert tonight.at and tonight.until > tonight.at
    for changes, name in (({"args": ["--lr"]}, "ARGS"), ({"script": "b.py"}, "SCRIPT")):
        with pytest.raises(UserError, match=f"omit {name}"):
            build_script.resume_config(began, changes)
    without = replace(began, resume_args=None)
    with pytest.raises(UserError, match="type RESUME_ARGS="):
        build_script.resume_config(without, {})
    assert build_script.resume_config(without, {"resume_args": "--again"}).resume_args == "--again"
    assert options.read(options.document(began)) == began


def test_a_folder_of_30_gb_is_refused_before_anything_is_read(project, monkeypatch):
    (project / "data").mkdir()
    for number in range(30):
        with (project / f"data/{number}.bin").open("wb") as file:
            file.truncate(1 << 30)
    monkeypatch.setattr(code.shutil, "copy2", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(UserError, match=r"1.07 GB \(data has 32.2 GB\): let git ignore what is no"):
        read(project)


def failed(**fields):
    return failures.Failure(host="node1", source="worker", order=0, rank=0, **fields)


def test_exit_codes_of_a_script_are_not_the_trainers():
    for number in (OUT_OF_MEMORY, STOPPED):
        own = failed(exit_code=number, has_exit_codes=False)
        assert own.restart is failures.Restart.HELPS
        assert not own.peer_lost
        assert own.run_exit_code == number
    assert failed(exit_code=OUT_OF_MEMORY).restart is failures.Restart.IN_SMALLER_PIECES


def test_the_machines_are_checked_and_nothing_is_said_of_precision(project, monkeypatch):
    hosts = [host(1), host(2)]
    found = {h.name: facts(n) for n, h in enumerate(hosts, 1)}
    monkeypatch.setattr(inventory, "load", lambda _path: hosts)
    monkeypatch.setattr(look, "open_and_probe", lambda *_, **__: OpenMachines(hosts, {}, found))
    monkeypatch.setattr(look, "find_unreachable_peers", lambda *_: {})
    said = io.StringIO()
    ready = checks.check_machines(asked(project), Terminal(said))
    assert "precision" not in said.getvalue()
    assert checks.new_id(ready).endswith("Z-train-2n")
    made = checks.make_plan(ready, ready.machines, run="r")
    assert ready.program.folder == project
    assert json.loads(json.dumps(made.document()))["program"]["typed"] == "SCRIPT=train.py"


def test_the_second_run_of_a_script_divides_a_batch_by_the_speeds_of_the_first(
    project, monkeypatch, tmp_path
):
    hosts = [host(1), host(2)]
    found = {h.name: facts(n) for n, h in enumerate(hosts, 1)}
    monkeypatch.setattr(inventory, "load", lambda _path: hosts)
    monkeypatch.setattr(look, "open_and_probe", lambda *_, **__: OpenMachines(hosts, {}, found))
    monkeypatch.setattr(look, "find_unreachable_peers", lambda *_: {})
    monkeypatch.setattr(checks.folders, "RUNS", tmp_path / "runs")
    (project / "train.py").write_text("import tandem\n")

    def decide(**changes):
        config = asked(project, **changes)
        ready = checks.check_machines(config, Terminal(io.StringIO()))
        measured = checks.make_plan(ready, ready.machines, run="r").measured
        assert (measured.ranks, measured.is_typed) == ({"node1": 1, "node2": 1}, bool(changes))
        return choose_balance(measured)

    first = decide(balance="auto")
    assert not first.weights and "node1, node2" in first.reason and "the next run" in first.reason
    name = runs.run_id("train", 2, time.time())
    earlier = RunBuilder(
        tmp_path / "runs" / name, nodes=2, by_rank={1: {"backward": 0.208}}
    ).write()
    typed = options.document(asked(project))
    change(earlier / "plan.json", options=typed, program=SCRIPT)
    assert decide().weights == {"node1": 1000, "node2": 500}
    assert decide(balance="1:3").weights == {"node1": 1, "node2": 3}
    change(earlier / "plan.json", options={**typed, "script": "/other/train.py"}, program=SCRIPT)
    assert not decide().weights


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--lr", "0.1", "--hf_token", "hf_abc123XYZ"], "--hf_token"),
        (["--wandb.api-key=0123456789abcdef"], "--wandb.api-key"),
        (["WANDB_API_KEY=0123456789abcdef"], "WANDB_API_KEY"),
        (["--mask_token", "[MASK]", "--token", "--tokenizer=gpt2-1234", "--num-token", "9"], None),
    ],
)
def test_a_secret_in_args_is_said_to_be_readable_before_any_machine_is_asked(
    project, monkeypatch, words, name
):
    terminal = Terminal(said := io.StringIO())
    monkeypatch.setattr(inventory, "load", lambda _path: [host(1)])
    monkeypatch.setattr(look, "open_and_probe", lambda *_, **__: sys.exit())
    with pytest.raises(SystemExit):
        checks.check_machines(asked(project, words=tuple(words)), terminal)
    terminal.drain()
    assert said.getvalue().startswith(f"tandem: {name}: every user") == bool(said.getvalue())
    assert bool(said.getvalue()) == bool(name)


def test_its_command_can_be_typed_again(project):
    plan = RunPlan(options=options.document(asked(project, words=("--lr", "1"))))
    run = SimpleNamespace(plan=plan, hosts=["node1"], program=plan.program)
    typed = shlex.split(train_line(run))
    assert {f"SCRIPT={project}/train.py", "ARGS=--lr 1"} < {*typed}
    assert not [word for word in typed if word.startswith(("MODEL", "DATA"))]
