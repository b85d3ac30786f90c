"""What is said about cards with given figures: good ones, and each fault alone."""

import yaml

from planning import accept_gpu
from tests.unit.ansible.provision_machines import ROOT

TABLE = yaml.safe_load((ROOT / "ansible/gpus.yml").read_text())["gpus"]
# In the shape of gpuprobe.py; figures as published for cards in good order, none measured here.
GOOD = {
    "name": "NVIDIA GeForce RTX 2080 Ti",
    "driver": "580.126.20",
    "memory_mib": 11264,
    "used_mib": 1,
    "celsius": 71,
    "pcie": [3, 16],
    "pcie_max": [3, 16],
    "throttled": 0x4,
    "fp32": 12.4,
    "fp16": 47.0,
    "copy": 530.0,
    "to_card": 12.2,
    "from_card": 12.9,
}


def test_a_card_in_good_order_is_right():
    """What is found of others: refusals.py."""

    def findings(allreduce=None, **changes):
        results = {"node1": [{**GOOD, **changes}]}
        return accept_gpu.gpu_findings(results, TABLE, allreduce or {})

    assert findings() == findings({"seconds": 1.3, "floor_seconds": 1.2}) == []
    # As driver 440 prints it, before names began with NVIDIA.
    assert findings(name="GeForce RTX 2080 Ti") == []
    # One that is not in the table is judged by its link and clocks alone.
    assert findings(name="NVIDIA H200", fp32=1.0, copy=1.0) == []


def test_names_are_compared_to_their_end():
    assert accept_gpu.known("NVIDIA GeForce RTX 2080", TABLE) is None
    assert accept_gpu.known("NVIDIA GeForce RTX 3090 Ti", TABLE) is None
    assert accept_gpu.known("NVIDIA GeForce RTX 3090", TABLE)["copy"] == 936


def test_the_table_fits_80_columns():
    results = {
        "node1": [GOOD],
        "workstation-12": [
            {**GOOD, "name": "NVIDIA GeForce RTX 5090", "fp32": 98.7, "fp16": 201.3}
        ],
        "node3": [{"error": "torch 1.12.1 sees no card"}],
    }
    lines = accept_gpu.gpu_table(results, TABLE, {"seconds": 1.3, "floor_seconds": 1.2}, 102228128)
    assert max(len(line) for line in lines) <= 80
    assert "12.4/13.4" in lines[1] and "530/616" in lines[1] and "3x16" in lines[1]
    assert lines[-1] == "all-reduce of 102 MB over NCCL: 1.30 s, floor 1.20 s"


def test_every_known_card_names_its_source():
    assert all(row["source"] and row["copy"] and row["fp32"] for row in TABLE.values())
