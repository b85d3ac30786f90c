"""`make accept`: the timetable of pairs, what figures mean, and the probes by real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planning import accept, accept_gpu
from tests.unit.ansible.provision_machines import ROOT, load


@pytest.mark.parametrize("count", [2, 3, 4, 5, 16])
def test_everybody_meets_everybody_once_and_nobody_twice_at_a_time(count):
    hosts = [f"node{n}" for n in range(1, count + 1)]
    rounds = accept.accept_rounds(hosts)
    assert len(rounds) == count - 1 + count % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len({frozenset(pair) for pair in met}) == count * (count - 1) // 2
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))


def results(rates, mtu=1500, speed=1000):
    """Results of machines a, b, c, ... with {"ab": Mbit/s} for each pair."""
    hosts = sorted({host for pair in rates for host in pair})
    made = []
    for host in hosts:
        pairs = {
            pair[1]: {"mbit_to": rate, "mbit_from": rate, "mtu": mtu, "latency_ms": 0.1,
                      "latency_p99_ms": 0.2}
            if rate
            else {"error": "timed out"}
            for pair, rate in rates.items()
            if pair[0] == host
        }  # fmt: skip
        card = {"interface": "eth0", "mtu": 1500, "speed": speed}
        disk = {"filesystem": "ext4", "mb_per_second": 500.0}
        made.append({"host": host, "card": card, "pairs": pairs, "disk": disk, "data": None})
    return made


def test_good_machines_have_no_findings():
    """What is found in others: tests/messages/ansible.py."""
    assert accept.accept_findings(results({"ab": 941, "ac": 939, "bc": 930}), None) == []
    assert accept.accept_findings(results({"ab": 94}, speed=None), None) == []


def test_the_floor_of_an_allreduce_is_that_of_a_ring_over_the_slowest_link():
    rates = {"ab": 1000, "ac": 1000, "ad": 1000, "bc": 1000, "bd": 1000, "cd": 800}
    figures = accept.accept_allreduce([1.0, 1.7], 100_000_000, results(rates))
    assert figures["floor_seconds"] == pytest.approx(2 * 3 / 4 * 100e6 * 8 / 800e6)
    assert figures["seconds"] == 1.7
    assert accept.accept_findings(results(rates), figures) == []


def test_the_table_fits_a_terminal():
    rates = {"ab": 941, "ac": 0, "bc": 12345.6}
    figures = {"bytes": 102_228_128, "seconds": 1.29, "floor_seconds": 1.23, "mbit": 941}
    lines = accept.accept_table(results(rates), figures)
    assert max(map(len, lines)) <= 80
    assert lines[-1] == ("all-reduce of 102 MB over 3 machines: 1.29 s, floor 1.23 s at 941 Mbit/s")


def test_probes_of_three_machines_measure_each_other(tmp_path):
    """127.0.0.1 to 127.0.0.3 stand for three machines: an odd number, so each rests once."""
    hosts = ["a", "b", "c"]
    peers = {host: f"127.0.0.{n}" for n, host in enumerate(hosts, start=1)}
    running = []
    for host in hosts:
        plan = {"host": host, "address": peers[host], "interface": "lo", "peers": peers,
                "port": 29471, "token": "t0ken", "seconds": 0.1, "settle": 0, "patience": 30,
                "rounds": accept.accept_turns(hosts, host)}  # fmt: skip
        (tmp_path / f"{host}.plan").write_text(json.dumps(plan))
        argv = [sys.executable, ROOT / "launcher/node/pairprobe.py"]
        argv += [tmp_path / f"{host}.plan", tmp_path / host]
        running.append(subprocess.Popen(argv, env={"HOME": str(tmp_path)}))
    assert [one.wait(timeout=60) for one in running] == [0, 0, 0]
    pairs = accept.accept_pairs([json.loads((tmp_path / host).read_text()) for host in hosts])
    assert [entry["pair"] for entry in pairs] == [["a", "b"], ["a", "c"], ["b", "c"]]
    for entry in pairs:
        assert "error" not in entry, entry
        assert entry["mtu"] > 60000  # loopback carries 65536
        assert entry["mbit_to"] > 0
        assert entry["mbit_from"] > 0


def test_the_disk_is_read_and_a_data_set_that_is_large_enough(tmp_path, monkeypatch, capsys):
    probe = load("ansible/roles/accept/files/diskprobe.py")
    monkeypatch.setattr(probe, "CHUNK", 1 << 12)  # so that its file has 1 MB
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "set"

    def figures():
        monkeypatch.setattr(sys, "argv", ["diskprobe.py", str(data), "0.1"])
        probe.main()
        return json.loads(capsys.readouterr().out)

    assert figures()["data"] is None
    data.mkdir()
    (data / "small.png").write_bytes(bytes(1000))
    measured = figures()
    assert measured["disk"]["mb_per_second"] > 0
    assert measured["data"]["mb_per_second"] is None  # so little says nothing
    with (data / "large.tar").open("wb") as file:
        file.truncate(65 << 20)
    assert figures()["data"]["mb_per_second"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_playbooks_have_the_settings_whatever_inventory_is_given(tmp_path):
    """Ansible looks for group_vars beside the inventory and beside the playbook alone."""
    inventory = tmp_path / "inventory.ini"
    inventory.write_text("[cluster]\nnode1 ansible_host=192.168.56.111\n")
    argv = [sys.executable, "-m", "ansible", "inventory", "--inventory", str(inventory)]
    argv += ["--playbook-dir", str(ROOT / "ansible/playbooks"), "--host", "node1"]
    printed = subprocess.run(argv, capture_output=True, check=True, cwd=ROOT).stdout
    assert json.loads(printed)["require_all"] is False


def test_nodes_of_one_machine_have_no_network_to_measure():
    """The demo's list: the play ended with four tracebacks of a filter, which advised a setting."""
    argv = [Path(sys.executable).with_name("ansible-playbook"), "ansible/playbooks/accept.yml"]
    argv += ["--inventory", "examples/demo.ini"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "ERROR" not in said and "changed:" not in said
    assert said.count("node1, node2, node3, node4 are nodes of this one machine") == 1


KNOWN = yaml.safe_load((ROOT / "ansible/gpus.yml").read_text())["gpus"]
# In the shape of gpuprobe.py; figures as published for cards in good order, none measured here.
GOOD = {
    "name": "NVIDIA GeForce RTX 2080 Ti",
    "driver": "580.126.20",
    "memory_mib": 11264,
    "used_mib": 1,
    "celsius": 71,
    "generation": 3,
    "lanes": 16,
    "most_lanes": 16,
    "throttled": 0x4,
    "fp32": 12.4,
    "fp16": 47.0,
    "copy": 530.0,
    "to_card": 12.2,
    "from_card": 12.9,
}


def test_a_card_in_good_order_is_right():
    """What is found of others: tests/messages/ansible.py."""

    def findings(allreduce=None, **changes):
        results = {"node1": [{**GOOD, **changes}]}
        return accept_gpu.gpu_findings(results, KNOWN, allreduce or {})

    assert findings() == findings({"seconds": 1.3, "floor_seconds": 1.2}) == []
    # As driver 440 prints it, before names began with NVIDIA.
    assert findings(name="GeForce RTX 2080 Ti") == []
    # One that is not in the table is judged by its link and clocks alone.
    assert findings(name="NVIDIA H200", fp32=1.0, copy=1.0) == []


def test_names_are_compared_to_their_end():
    assert accept_gpu.row_of("NVIDIA GeForce RTX 2080", KNOWN) is None
    assert accept_gpu.row_of("NVIDIA GeForce RTX 3090 Ti", KNOWN) is None
    assert accept_gpu.row_of("NVIDIA GeForce RTX 3090", KNOWN)["copy"] == 936


def test_the_table_of_cards_fits_80_columns():
    results = {
        "node1": [GOOD],
        "workstation-12": [
            {**GOOD, "name": "NVIDIA GeForce RTX 5090", "fp32": 98.7, "fp16": 201.3}
        ],
        "node3": [{"error": "torch 1.12.1 sees no card"}],
    }
    lines = accept_gpu.gpu_table(results, KNOWN, {"seconds": 1.3, "floor_seconds": 1.2}, 102228128)
    assert max(len(line) for line in lines) <= 80
    assert "12.4/13.4" in lines[1] and "530/616" in lines[1] and "3x16" in lines[1]
    assert lines[-1] == "all-reduce of 102 MB over NCCL: 1.30 s, floor 1.20 s"
