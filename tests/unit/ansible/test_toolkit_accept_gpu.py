"""What is said about cards with given figures: good ones, and each fault alone."""

import re

import pytest
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


def findings(allreduce=None, **changes):
    return accept_gpu.gpu_findings({"node1": [{**GOOD, **changes}]}, TABLE, allreduce or {})


def test_a_card_in_good_order_is_right():
    assert findings() == []
    # As driver 440 prints it, before names began with NVIDIA.
    assert findings(name="GeForce RTX 2080 Ti") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fp32": 6.0}, r"fp32 matrix product 6\.0 TFLOP/s, while 13\.4 are usual"),
        ({"fp16": 12.0}, r"fp16 matrix product 12\.0 TFLOP/s, while 53\.8 are usual"),
        ({"copy": 300.0}, r"memory copy 300\.0 GB/s, while 616 are usual"),
        ({"memory_mib": 8192}, "8192 MiB of memory, while 11 GB are usual"),
        ({"throttled": 0x44}, "slowed down by its hardware, for the heat .too hot; 71 C"),
        ({"throttled": 0x80}, "too little power"),
        (
            {"pcie": [3, 4], "pcie_max": [3, 16], "to_card": 3.1, "from_card": 3.2},
            "linked by 4 of its 16 lanes of PCIe; the slot has more: reseat it",
        ),
        (
            {"pcie": [3, 8], "pcie_max": [3, 8], "to_card": 6.1, "from_card": 6.3},
            "8 of its 16 lanes.*the slot has no more",
        ),
        ({"to_card": 5.0}, r"5\.0 GB/s pass between it.*15\.8 fit through 16 lanes of PCIe 3"),
    ],
)
def test_each_fault_is_named_alone_with_its_machine_and_card(changes, sentence):
    found = findings(**changes)
    assert len(found) == 1 and found[0].startswith("node1, card 0: ")
    assert re.search(sentence, found[0])


def test_a_card_that_is_not_in_the_table_is_judged_by_its_link_and_clocks_alone():
    assert findings(name="NVIDIA H200", fp32=1.0, copy=1.0) == []
    assert len(findings(name="NVIDIA H200", throttled=0x8)) == 1


def test_names_are_compared_to_their_end():
    assert accept_gpu.known("NVIDIA GeForce RTX 2080", TABLE) is None
    assert accept_gpu.known("NVIDIA GeForce RTX 3090 Ti", TABLE) is None
    assert accept_gpu.known("NVIDIA GeForce RTX 3090", TABLE)["copy"] == 936


def test_a_card_that_could_not_be_measured_and_different_drivers():
    results = {"node1": [GOOD], "node2": [{**GOOD, "driver": "535.1"}, {"error": "CUDA error: x"}]}
    found = accept_gpu.gpu_findings(results, TABLE, {})
    assert "node2, card 1: it could not be measured: CUDA error: x." in found[0]
    assert "different drivers (535.1, 580.126.20)" in found[1]


def test_an_allreduce_far_above_its_floor():
    assert findings({"seconds": 1.3, "floor_seconds": 1.2}) == []
    assert "takes 3.00 s" in findings({"seconds": 3.0, "floor_seconds": 1.2})[0]


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
