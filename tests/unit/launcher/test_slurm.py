"""The batch script for Slurm and the machines of its job, with a stand-in for srun; with a real one
in tests/lab/test_slurm.py."""

import contextlib
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import folders, slurm
from launcher.machines import engine, inventory
from launcher.machines import slurm as machines
from launcher.machines.engine import Host, talk
from launcher.options import make_config, read
from launcher.programs import build_program
from launcher.watch import attempts
from tests.unit.launcher.guard_client import workers
from tests.unit.launcher.launcher_values import build, facts, sent_to_trainer

# Prints what the batch script starts, and with which job.
PYTHON = """#!/bin/sh
printf '%s\\n' "$TANDEM_JOB" "$*" "$PWD"
"""
# On each machine of the job it says its name and its cards; on one it runs a command.
SRUN = """#!/bin/sh
case "$*" in *--ntasks-per-node=1*) printf 'tandem 1 node2 2,3\\ntandem 0 node1 0,1\\n'; exit;; esac
while case "$1" in --*) true;; *) false;; esac; do echo "$1" >> "$0.log"; shift; done
exec "$@"
"""
CARDS = {"node1": {"10.0.0.2": "ib0"}, "node2": {"10.0.0.1": "eno1"}}  # by which each is reached
NAMES = {"node1": "127.0.1.1", "node2": "10.0.0.2"}  # on node1, as on Debian


@pytest.fixture
def job(tmp_path, monkeypatch):
    """job(options) -> the script's text, and the machines of the job that it runs in."""
    for name, text in (("python", PYTHON), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(machines, "find_address", NAMES.get)
    monkeypatch.setattr(machines, "route", {"10.0.0.2": {"source": "10.0.0.1"}}.get)

    def submit(gpus=None, own=None, nodes=2, **options):
        place = ("pc", "ssh", "10.9.9.9", 22, None, "/env/bin/python", "tandem", "/data")
        host = Host(*place, gpus=gpus, **(own or {}))
        with monkeypatch.context() as patch:
            patch.setattr(slurm.sys, "executable", str(tmp_path / "python"))
            text = slurm.write_batch_script(make_config({"nodes": nodes, **options}), host, "a-run")
        env = {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        sent, *rest = done.stdout.splitlines()
        assert rest == ["-m launcher slurm", str(tmp_path)]
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_NNODES", str(nodes))
        monkeypatch.setenv(inventory.JOB, sent)
        return text, inventory.load(Path("none"))

    return submit


def parts(hosts, options):
    """The plan of these machines."""
    known = [facts(n, interfaces=CARDS[f"node{n}"]) for n in (1, 2)]
    return build(hosts, known, options).nodes


def test_each_machine_of_the_job_gets_its_part_of_a_run(job):
    text = """{"x": "two  words $HOME `x` 'y'"}"""
    _, hosts = job(epochs=2, args=["--model_args", text])
    assert [(host.name, host.address) for host in hosts] == [
        *(("node1", "10.0.0.1"), ("node2", "10.0.0.2"))
    ]
    options = read(json.loads(os.environ[inventory.JOB])["options"])
    first, second = parts(hosts, options)
    given = sent_to_trainer(first)
    assert (first.env["TANDEM_DATA"], given["epochs"]) == ("/data/digits", 2)
    assert given["model_args"] == text
    assert given == sent_to_trainer(second) and options.force
    assert {*first.argv} ^ {*second.argv} == {"--node_rank=0", "--node_rank=1"}
    assert first.argv[0] == "/env/bin/python" and "--master_addr=10.0.0.1" in second.argv
    assert (first.env["GLOO_SOCKET_IFNAME"], second.env["GLOO_SOCKET_IFNAME"]) == ("ib0", "eno1")


def test_a_machine_has_the_jobs_environment_and_its_own(job, monkeypatch):
    """InfiniBand stays allowed, and PATH begins with the job's."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    own = {"ODD": "two  words $HOME `x` 'y'", "ATEN_CPU_CAPABILITY": "default"}
    _, hosts = job(own={"cuda_home": "/opt/cuda", "env": own})
    for node in parts(hosts, Config()):
        assert own.items() <= node.env.items() and node.env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert node.env["PATH"] == f"/opt/cuda/bin:{os.environ['PATH']}"
        assert node.env["CUDA_HOME"] == "/opt/cuda" and "NCCL_IB_DISABLE" not in node.env


def test_a_command_is_a_step_on_its_machine_that_does_not_see_the_job(job, tmp_path):
    _, hosts = job()
    nodes, failures = engine.open_all(hosts)
    said = 'read word; echo "$word ${TANDEM_JOB-none} $TANDEM_IN_JOB"; exit 3'
    done = talk(nodes["node2"].start(["sh", "-c", said]), b"heard\n", 20.0)
    assert (failures, done) == ({}, (b"heard none 1\n", "", 3))
    steps = (tmp_path / "srun.log").read_text().split()
    assert {"--nodelist=node2", "--nodes=1", "--ntasks=1", "--overlap"} <= {*steps}


def test_a_guard_in_a_job_stays_in_it_and_hands_its_environment_on(guards, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_IN_JOB", "1")
    monkeypatch.setenv("LMOD_DIR", "/modules")
    guard = guards()
    assert guard.wait_for("hello")["way"] == "wardens"
    guard.start(tmp_path, workers("import os; print(os.environ['LMOD_DIR'], flush=True)"))
    guard.wait_for_output(b"/modules")


def test_a_job_whose_second_node_cannot_be_reached_says_so():
    with pytest.raises(
        UserError, match=r"localhost is .*, an address at which no other node can reach it"
    ):
        machines.find_address("localhost")


def test_a_machine_that_starts_no_step_ends_the_job(job):
    with pytest.raises(UserError, match="Slurm started no step on all machines"):
        job(nodes=3)


def test_the_cards_of_a_machine_are_those_that_the_job_has_there(job):
    text, hosts = job()
    assert "gpus" not in text.split("set -euo")[0]
    assert not any("CUDA_VISIBLE_DEVICES" in host.env for host in hosts)
    text, hosts = job(gpus=2)
    assert "#SBATCH --gpus-per-node=2\n" in text
    assert [host.env["CUDA_VISIBLE_DEVICES"] for host in hosts] == ["0,1", "2,3"]


@pytest.mark.parametrize("began", [False, True])
def test_a_script_that_is_submitted_again_goes_on_with_its_run(job, tmp_path, monkeypatch, began):
    job(epochs=2)
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    if began:
        (tmp_path / "runs/a-run").mkdir(parents=True)
        (tmp_path / "runs/a-run/plan.json").touch()
    monkeypatch.setattr(slurm.run, "resume", lambda *words: ("resume", *words))
    monkeypatch.setattr(slurm.run, "train", lambda config, name: (config.trainer, name))
    done = slurm.main(Config())
    assert done == (("resume", "a-run", {}) if began else ({"epochs": 2}, "a-run"))
    assert attempts.explain_how_to_resume("a-run", True, None).endswith(
        "`sbatch runs/a-run.sbatch`"
    )


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written() -> the scripts that `make slurm` has left."""
    place = ("node1", "ssh", "10.0.0.1", 22, None, "python", "tandem", "/data")
    env = {"PASSWORD": "secret"}
    monkeypatch.setattr(slurm, "check_here", lambda *_: None)
    monkeypatch.setattr(slurm.inventory, "load", lambda _: [Host(*place, env=env)] * 2)
    monkeypatch.setattr(slurm, "CHECKOUT", tmp_path)
    return lambda: list((tmp_path / "runs").iterdir())


def test_a_script_is_for_all_machines_and_its_owners_alone(written, capsys):
    """It has run_env, which may hold a password."""
    assert slurm.main(Config(data="digits")) == 0
    (script,) = written()
    text = script.read_text()
    assert "#SBATCH --nodes=2\n" in text and '"PASSWORD": "secret"' in text
    assert script.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.splitlines()[1] == f"sbatch runs/{script.name}"


def test_a_script_is_written_whole_or_not_at_all(written):
    """On a disk that takes 100 bytes of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            slurm.main(Config(nodes=2, data="digits"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet19"}, "MODEL=resnet19: this torchvision"),
        ({"data": "nosuch"}, "nosuch is missing"),
        ({"nodes": 4}, "NODES=4: Slurm's largest partition has 3 here"),
        ({"nodes": 3}, None),
    ],
)
def test_what_the_job_would_fail_by_is_refused_before(monkeypatch, tmp_path, options, said):
    """Of this machine's torchvision and data, as on a cluster's login node; sinfo is a stand-in."""
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data/digits" / name).mkdir(parents=True)
        (tmp_path / "data/digits" / name / "0.png").touch()
    sinfo = tmp_path / "bin/sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\necho 2; echo 3\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sinfo.parent}:{os.environ['PATH']}")
    place = ("n1", "local", "127.0.0.1", 22, None, "python", "tandem", str(tmp_path / "data"))
    given = make_config({"model": "resnet18", "batch": 1, **options})

    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        slurm.check_here(Host(*place), given, build_program(given), given.nodes or 2)
