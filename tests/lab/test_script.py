"""Scripts of a user's own on three machines, by one command each: without a framework, and with
Lightning and Accelerate in layers that were gathered before, since the lab has no internet; then
three lines of Tandem in one."""

import contextlib
import json
import re
import shutil
import uuid
from pathlib import Path

import pytest

from lab import cgroup
from lab.plan import CACHE, RELEASES
from launcher.plan import layer
from launcher.plan.requirements import read_requirements
from tests.lab.chaos_run import CHECKOUT, Running
from tests.lab.site_plays import draw_digits, play, write_inventory, write_play
from tests.run_directory import problems

NODES = 3
HERE = Path(__file__).parent
PLAIN = CHECKOUT / "examples/own_script/train.py"
ENVIRONMENT = "ls -d /opt/tandem/envs/cpu-*/bin/python | head -1"
# `make bundle SCRIPT=` asks machines and an index; the lab's control node sees only machines.
ASKED = """
import dataclasses, json, sys, types
from launcher import cli
from launcher.plan import layer
def told(requirements, environment, folder):
    print("environment", json.dumps(dataclasses.asdict(environment)))
    return types.SimpleNamespace(tree=requirements.path)
layer.build_layer = told
sys.exit(cli.main(["gather", *sys.argv[1:]]))
"""
FRAMEWORKS = {"lightning": "2.6.6", "accelerate": "1.15.0"}


@pytest.fixture(scope="module")
def cluster(start_lab, tmp_path_factory):
    """(lab, inventory) of three machines with the environment and the digits."""
    draw_digits()
    made = any((CACHE / "envs" / RELEASES[0]).glob("cpu-*/bin/python"))  # by an earlier lab
    more = ["--no-bundle"] if made else []
    lab = start_lab("script", "--nodes", str(NODES), "--rate", "1gbit", *more)
    folder = tmp_path_factory.mktemp("site")
    addresses = {f"node{n}": f"ansible_host=192.168.56.{110 + n}" for n in range(1, NODES + 1)}
    settings = ("-i", write_inventory(folder, addresses), "-e", "@group_vars/all.yml")
    if not made:
        for hosts in ("node1", "cluster"):
            roles = write_play(folder, ["preflight", "python_env"], hosts, become=True)
            play(lab, *settings, roles)
    play(lab, *settings, write_play(folder, ["data"]))
    python = lab.ssh(1, ENVIRONMENT).strip()
    return lab, lambda where, more="": write_inventory(
        where, {name: f"{one} env_python={python} {more}" for name, one in addresses.items()}
    )


@pytest.fixture(scope="module")
def gathered(cluster, tmp_path_factory):
    """{framework: the file of its requirements}, in the bundle and not yet in any layer."""
    lab, inventory = cluster
    folder = tmp_path_factory.mktemp("requirements")
    asks = ["python", "-c", ASKED, "--inventory", inventory(folder), "--script", str(PLAIN)]
    found, files, keys = None, {}, []
    for name, version in FRAMEWORKS.items():
        files[name] = folder / f"{name}.txt"
        files[name].write_text(f"--find-links {folder}\n{name}=={version}\n")  # a layer of its own
        if found is None:
            said = lab.control(*asks, "--requirements", str(files[name])).stdout
            found = json.loads(re.search(r"^environment (.*)", said, re.M)[1])
        packages = tuple(map(tuple, found["packages"]))
        environment = layer.Environment(**{**found, "packages": packages})
        asked = read_requirements(files[name])
        keys.append(layer.build_layer(asked, environment, layer.BUNDLE).tree.parent.name)
    yield files
    for key in keys:
        shutil.rmtree(layer.BUNDLE / key)
        shutil.rmtree(layer.CACHE / key, ignore_errors=True)


def make(lab, verb, **words):
    """What one command printed."""
    return lab.control("make", verb, *(f"{name}={value}" for name, value in words.items())).stdout


def ended(said):
    """The run's folder and what its report says in figures."""
    name = re.search(r"^tandem: run (\S+), attempt", said, re.M)[1]
    run = CHECKOUT / "runs" / name
    assert problems(run) == []
    return run, json.loads((run / "summary.json").read_text())


def asked(name, files):
    """SCRIPT= and its companions, its arguments for so many epochs, and what it prints then."""
    if name == "plain":
        return {"SCRIPT": PLAIN}, "--epochs {}", "epoch {}: loss"
    script = HERE / f"scripts/{name}_script.py"
    words = {"SCRIPT": script, "REQUIREMENTS": files[name]}
    return words, "{}", f"epoch {{}}: {name} {FRAMEWORKS[name]}, {NODES} ranks"


@pytest.mark.parametrize("name", ["plain", *FRAMEWORKS])
def test_it_trains_on_three_machines_by_one_command(cluster, gathered, tmp_path, name):
    lab, inventory = cluster
    words, arguments, printed = asked(name, gathered)
    words |= {"NODES": NODES, "ARGS": arguments.format(2), "INVENTORY": inventory(tmp_path)}
    if name == "plain":
        words["OUTPUT"] = "checkpoints"
    said = make(lab, "train", **words)
    assert f"[node1 0] {printed.format(1)}" in said, said
    run, summary = ended(said)
    assert (summary["status"], summary["nodes"], summary["world_size"]) == ("finished", 3, 3)
    assert "nobody timed the steps of this script" in (run / "report.txt").read_text()
    if name == "plain":
        came = sorted(path.name for path in run.glob("work/*/checkpoints/*"))
        assert came == ["epoch-000.pt", "epoch-001.pt"]


@pytest.mark.parametrize("name", ["plain", *FRAMEWORKS])
def test_a_machine_is_killed_and_named_and_nothing_is_left(cluster, gathered, tmp_path, name):
    lab, inventory = cluster
    words, arguments, printed = asked(name, gathered)
    value = uuid.uuid4().hex
    mark = f"""run_env='{{"TANDEM_TEST_MARK": "{value}"}}'"""
    options = ["--inventory", inventory(tmp_path, mark), "--nodes", str(NODES)]
    for variable, given in words.items():
        options += [f"--{variable.lower()}", str(given)]
    long = arguments.format(100_000).split()
    run = Running(lab, tmp_path, f"TANDEM_TEST_MARK={value}", *options, "--", *long)
    try:
        run.wait_for(re.escape(printed.format(1)))
        assert len(run.processes()) >= 3 * NODES
        lab("kill", "3")
        assert run.end() == 1, run.said()
        (attempt,) = run.attempts()
        assert attempt["first_cause"]["host"] == "node3"
        assert "no heartbeat" in attempt["first_cause"]["message"]
        assert "RESUME_ARGS=" in run.said()
        assert run.processes() == []
    finally:
        lab("mend", "3")
        run.close()


@pytest.mark.parametrize("own", [False, True], ids=["newest", "its own"])
def test_code_in_a_machine_s_checkpoint_goes_nowhere_with_resume_from_self(cluster, tmp_path, own):
    lab, inventory = cluster
    came = f"/tmp/{uuid.uuid4().hex}"
    words = {"SCRIPT": HERE / "scripts/taken_over.py", "OUTPUT": "out", "NODES": 2}
    words |= {"ARGS": f"--came {came}", "RESUME_ARGS": "--resume {last}", "MAX_RESTARTS": 1}
    words |= {"RESUME_FROM": "self"} if own else {}
    said = make(lab, "train", INVENTORY=inventory(tmp_path), **words)
    print(said)
    reached = [bool(lab.ssh(n, f"cat {came} || true").strip()) for n in (1, 2)]
    assert reached == [True, not own]


TWO_LINES = [
    ("from torch import distributed", "from tandem import sync, timings\n\\g<0>"),
    (r"in loader:", "in timings.timed(loader, model):"),
    (r"    optimizer\.step\(\)", "\\g<0>\n    timings.step()"),
]
THIRD = [(r"(?m)^optimizer = ", 'sync.attach(model, "ef:3:peak")\n\\g<0>')]


@pytest.fixture
def sleeper(cluster, tmp_path):
    """sleeper(lines) -> (folder, summary) of a run of the sleeping script with these lines."""
    lab, inventory = cluster

    def trained(lines, steps, nodes=NODES):
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        text = (HERE / "scripts/plain_sleeper.py").read_text()
        for pattern, line in lines:
            text, times = re.subn(pattern, line, text)
            assert times == 1, pattern
        (folder / "train.py").write_text(text)
        shutil.copy(HERE / "sleeping_model.py", folder)
        words = {"SCRIPT": folder / "train.py", "NODES": nodes, "ARGS": f"--steps {steps}"}
        said = make(lab, "train", INVENTORY=inventory(tmp_path), **words)
        return ended(said)

    return trained


def test_three_lines_give_the_verdict_and_send_a_few_bits(sleeper):
    run, exact = sleeper(TWO_LINES, 110)
    told = " ".join((run / "report.txt").read_text().split())
    assert exact["bottleneck"] == "network", told
    assert "The network is the bottleneck" in told and 'tandem.sync.attach(model, "' in told
    _, coded = sleeper([*TWO_LINES, *THIRD], 110)
    assert coded["sync"] == "ef:3:peak"
    ratio = exact["bytes_sent_per_step"] / coded["bytes_sent_per_step"]
    print(f"{exact['bytes_sent_per_step']:.0f} and {coded['bytes_sent_per_step']:.0f} bytes a step")
    # 32 bits, and about one, as zstd compresses the codes of three levels.
    assert 20 < ratio < 50


QUOTAS = {1: 0.6, 2: 0.3}  # processors


@pytest.fixture
def slowed(cluster):
    """Gives both machines less processor time, the second half of the first's."""
    lab, _ = cluster
    groups = []
    # By its kernel's address, node2 is a machine of its own: nodes of one machine get equal parts.
    lab.ssh(2, "echo another > kernel; sudo mount --bind kernel /sys/kernel/vmcoreinfo")
    try:
        for number, processors in QUOTAS.items():
            group = Path(f"/sys/fs/cgroup/cpu/{lab.name}-node{number}")
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text("10000")
            (group / "cpu.cfs_quota_us").write_text(str(int(10000 * processors)))
            # What the machine starts from now on is in its group, too.
            for path in cgroup.group_of(lab.name, f"node{number}").rglob("cgroup.procs"):
                for process in path.read_text().split():
                    with contextlib.suppress(OSError):  # it has ended
                        (group / "cgroup.procs").write_text(process)
        yield
    finally:
        lab.ssh(2, "sudo umount /sys/kernel/vmcoreinfo")
        for group in groups:
            for process in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(process)
            group.rmdir()


@pytest.mark.long
@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpu").is_dir(), reason="needs the cpu controller, v1")
def test_the_second_run_of_a_script_splits_a_batch_by_speed(cluster, slowed, tmp_path):
    lab, inventory = cluster
    words = {"SCRIPT": HERE / "scripts/balanced_script.py", "NODES": 2}
    parts, rates = [], []
    for balance in ("off", "auto"):
        said = make(lab, "train", INVENTORY=inventory(tmp_path), BALANCE=balance, **words)
        _, summary = ended(said)
        printed = re.findall(r"\[node(\d) \d\] (\d+) steps, (\d+) samples", said)
        assert len({steps for _, steps, _ in printed}) == 1 and len(printed) == 2
        parts.append({int(node): int(samples) for node, _, samples in printed})
        rates.append(summary["images_per_second"])
    print(parts, rates)
    equal, by_speed = parts
    assert equal[1] == equal[2] and rates[1] > rates[0]
    # Each machine's time is its samples by its processors; ideally, both take the same.
    ideal = sum(by_speed.values()) / sum(QUOTAS.values())
    assert ideal / max(by_speed[node] / QUOTAS[node] for node in QUOTAS) >= 0.95
