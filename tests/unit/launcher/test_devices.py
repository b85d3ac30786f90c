"""Which GPUs a node's processes get, what decides that, and the precision for all."""

import io

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import look
from launcher.look import OpenMachines
from launcher.node import probe as cards_of
from launcher.plan import checks, devices, plan
from launcher.terminal import Terminal
from tests.unit.launcher import launcher_values
from tests.unit.launcher.launcher_values import (
    VERSIONS,
    build,
    card,
    codes,
    facts,
    gpus,
    host,
    needs,
    refused,
)

OWN = "CUDA_VISIBLE_DEVICES"
CARDS = {
    "1080 Ti": {"name": "NVIDIA GeForce GTX 1080 Ti", "sm": 61, "pci": "1b06"},
    "2080 Ti": {"name": "NVIDIA GeForce RTX 2080 Ti", "sm": 75, "pci": "1e07"},
    "3090": {"name": "NVIDIA GeForce RTX 3090", "sm": 86, "pci": "2204"},
}


@pytest.fixture(autouse=True)
def mesh_is_whole(monkeypatch):
    monkeypatch.setattr(look, "find_unreachable_peers", lambda *_: {})


def having(*names):
    """The GPUs of a machine with these cards."""
    cards = [card(number, **CARDS[name]) for number, name in enumerate(names)]
    return gpus(0, cards=cards)


def given(nodes, count, machine="one", **changes):
    """(device, visible GPUs, processes) of each of some nodes on one machine with `count` GPUs;
    `nodes` are changes of each one's host."""
    hosts = [host(number, **change) for number, change in enumerate(nodes, 1)]
    found = [
        facts(number, machine=machine, gpus=gpus(count), **changes)
        for number, _ in enumerate(nodes, 1)
    ]
    made = build(hosts, found, settings={"per_node_batch_size": 64})
    return [(node.env["TANDEM_DEVICE"], node.env[OWN], len(node.ranks)) for node in made.nodes]


CPU = ("cpu", "", 1)


@pytest.mark.parametrize(
    "nodes, count, wanted",
    [
        ([{}], 0, [CPU]),
        ([{}], 2, [("cuda", "0,1", 2)]),
        ([{"gpus": 2}], 4, [("cuda", "0,1", 2)]),
        ([{"gpus": 0}], 4, [CPU]),
        # Several nodes share a machine's GPUs, or all compute on its CPU.
        ([{}] * 4, 2, [CPU] * 4),
        ([{}] * 3, 4, [("cuda", "0,1", 2), ("cuda", "2", 1), ("cuda", "3", 1)]),
        ([{"gpus": 1}, {}], 4, [("cuda", "0", 1), ("cuda", "1,2,3", 3)]),
        ([{}, {"gpus": 3}], 4, [("cuda", "3", 1), ("cuda", "0,1,2", 3)]),
        # The user's own choice.
        ([{"env": {OWN: "2,3"}, "gpus": 1}], 4, [("cuda", "2", 1)]),
        ([{"env": {OWN: ""}}], 4, [CPU]),
        ([{"env": {OWN: "MIG-7"}}], 1, [("cuda", "MIG-7", 1)]),
        ([{"env": {OWN: "1"}}, {}], 2, [("cuda", "1", 1), ("cuda", "0", 1)]),
    ],
)
def test_nodes_share_the_gpus_of_their_machine(nodes, count, wanted):
    assert given(nodes, count) == wanted


def test_containers_with_gpus_of_their_own_do_not_share():
    cards = [gpus(1, cards=[card(number)]) for number in (1, 2)]
    found = [facts(number, machine="one", gpus=own) for number, own in enumerate(cards, 1)]
    made = build([host(1), host(2)], found)
    assert [(node.env[OWN], len(node.ranks)) for node in made.nodes] == [("0", 1), ("0", 1)]


def test_gpus_are_counted_as_nvidia_smi_counts_them():
    one, other = build([host(1), host(2)], [facts(n, gpus=gpus(1)) for n in (1, 2)]).nodes
    assert one.env["CUDA_DEVICE_ORDER"] == other.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    own = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    made = build([host(1, env=own)], [facts(1, gpus=gpus(1))])
    assert made.nodes[0].env["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_accelerate_forms_a_group_of_cpus_and_leaves_gpus_to_itself():
    of_cpu, of_gpu = (build([host(1)], [facts(1, gpus=gpus(n))]).nodes[0].env for n in (0, 1))
    assert (of_cpu["ACCELERATE_USE_CPU"], of_gpu.get("ACCELERATE_USE_CPU")) == ("true", None)


def test_a_torch_without_cuda_computes_on_the_cpu():
    cpu_build = {**VERSIONS, "cuda": None}
    assert given([{}], 2, versions=cpu_build) == [CPU]
    with refused("gpus-unusable"):
        given([{"gpus": 2}], 2, versions=cpu_build)


def test_data_parallel_is_one_process_for_all_gpus_of_its_node():
    settings = {"parallel": "dp", "per_node_batch_size": 64}
    (node,) = build([host(1)], [facts(1, gpus=gpus(4))], settings=settings).nodes
    assert (node.env[OWN], node.ranks) == ("0,1,2,3", (0,))


def test_the_device_that_was_asked_for_is_said_once():
    settings = {"device": "cpu", "per_node_batch_size": 64}
    options = Config(trainer={"device": "cpu", "seed": 3})
    (node,) = build([host(1)], [facts(1, gpus=gpus(2))], options, settings=settings).nodes
    assert node.env["TANDEM_DEVICE"] == "cpu"
    assert node.env[OWN] == ""


@pytest.mark.parametrize(
    "nodes, count, code",
    [
        ([{"gpus": 4}], 1, "gpus-missing"),
        ([{"gpus": 1}] * 2, 1, "gpus-missing"),
        ([{"env": {OWN: "7"}}], 2, "gpu-unknown"),
        ([{"env": {OWN: "0"}}, {"env": {OWN: "0,MIG-7"}}], 2, "gpu-named-twice"),
        ([{"env": {OWN: "MIG-7"}}] * 2, 2, "gpu-named-twice"),
        ([{"env": {OWN: "0"}, "gpus": 2}], 2, "gpus-hidden"),
    ],
)
def test_gpus_that_are_not_there_are_refused(nodes, count, code):
    with refused(code):
        given(nodes, count)


def problems(hosts, found, begun=False, **settings):
    decided = {"precision": settings.pop("precision")} if begun else {}
    return launcher_values.problems(hosts, found, needs(decided=decided, **settings))


def test_a_broken_driver_is_no_matter_to_who_computes_on_the_cpu():
    """What is said else: tests/messages/launcher.py."""
    broken = gpus(0, error="Driver/library version mismatch")
    assert len(problems([host(1), host(2)], [facts(1, gpus=gpus(1)), facts(2, gpus=broken)])) == 1
    assert problems([host(2, gpus=0)], [facts(2, gpus=broken)]) == []
    assert problems([host(2)], [facts(2, gpus=broken)], device="cpu") == []


def test_whose_gpus_are_held_is_no_matter_to_who_computes_on_the_cpu():
    held = gpus(1, processes=[{"pid": 7, "user": "ann", "command": "python x"}])
    assert codes(problems([host(1)], [facts(1, gpus=held)])) == ["gpus-busy"]
    assert problems([host(1, gpus=0)], [facts(1, gpus=held)]) == []
    together = [facts(n, gpus=held, machine="one") for n in (1, 2)]
    assert problems([host(1), host(2)], together) == []


# The precision


def test_a_driver_that_does_not_tell_the_capability_is_asked_for_the_card():
    """440.33 has no compute_cap: the PCI device number is looked up in ansible/stacks.yml."""
    cards = [card(0, **{**CARDS["1080 Ti"], "sm": None}), card(1, sm=None)]
    found = facts(1, gpus=gpus(0, cards=cards))
    part = devices.assign([host(1)], {"node1": found}, needs().program)["node1"]
    assert [device.sm for device in part.devices] == [61, 75]


def test_a_card_of_no_known_number_counts_as_old():
    found = facts(1, gpus=gpus(0, cards=[card(0, sm=None, pci="ffff")]))
    machines = OpenMachines([host(1)], {}, {"node1": found})
    assert devices.choose_precision(needs().program, machines, None).name == "fp32"


def test_emulated_bf16_for_who_means_it():
    assert problems([host(1)], [facts(1)], precision="bf16", emulate=True) == []
    assert problems([host(1)], [facts(1, cpu_flags=["avx512_bf16"])], precision="bf16") == []


def test_a_limit_on_the_instructions_counts_as_their_lack(monkeypatch):
    found = facts(1, cpu_flags=["amx_bf16"])
    assert problems([host(1)], [found], precision="bf16") == []
    limited = host(1, env={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert codes(problems([limited], [found], precision="bf16")) == ["precision"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert codes(problems([host(1)], [found], precision="bf16")) == ["precision"]


def test_a_run_that_goes_on_keeps_its_level_and_names_who_lacks_it():
    """At a restart each machine is judged by itself: one that lacks the level stays out."""
    settings = {"precision": "bf16", "device": "cuda"}
    old, new = facts(1, gpus=having("2080 Ti")), facts(2, gpus=having("3090"))
    assert problems([host(2)], [new], begun=True, **settings) == []
    (one,) = problems([host(1)], [old], begun=True, **settings)
    assert "NVIDIA GeForce RTX 2080 Ti (node1)" in one.text and "omit node1" in one.text
    assert codes(problems([host(1)], [facts(1)], begun=True, **settings)) == ["no-gpu"]


def test_a_dry_run_shows_what_the_ranks_will_decide_and_a_resumed_run_keeps_it(monkeypatch):
    monkeypatch.setattr(checks.inventory, "load", lambda _path: [host(1), host(2)])
    cards = {f"node{n}": facts(n, gpus=having(name)) for n, name in ((1, "3090"), (2, "2080 Ti"))}
    machines = OpenMachines([host(1), host(2)], {}, cards)
    monkeypatch.setattr(look, "open_and_probe", lambda *_, **__: machines)
    terminal = Terminal(io.StringIO())
    ready = checks.check_machines(Config(), terminal)
    made = checks.make_plan(ready, ready.machines, run="r")
    assert "precision O1: " in plan.render(made, machines)
    assert {node.env["TANDEM_DEVICE"] for node in made.nodes} == {"cuda"}
    # The ranks are told what an earlier attempt decided. node2 lacks bf16, so it stays out.
    with pytest.raises(
        UserError, match=r"2080 Ti \(node2\).* keeps its first precision: omit node2"
    ):
        checks.check_machines(Config(), terminal, run="r", decided={"precision": "bf16"})
    again = checks.check_machines(Config(), terminal, run="r", decided={"precision": "O1"})
    assert checks.make_plan(again, machines, run="r").measured.decided == {"precision": "O1"}


# What the machines are asked


NEW = {
    "driver_version": "580.126.20, NVIDIA GeForce RTX 3090, GPU-1, 0x220410DE\n",
    "compute_cap": "8.6\n",
}
OLD = {"driver_version": "440.33.01, GeForce GTX 1080 Ti, GPU-3, 0x1B0610DE\n"}
ODD = {"driver_version": "580.126.20\n", "compute_cap": "[N/A]\n"}


@pytest.mark.parametrize(
    ("answers", "driver", "card"),
    [
        (NEW, "580.126.20", ("NVIDIA GeForce RTX 3090", "GPU-1", "2204", 86)),
        (OLD, "440.33.01", ("GeForce GTX 1080 Ti", "GPU-3", "1b06", None)),
        (ODD, "580.126.20", ("GPU", "", None, None)),
    ],
)
def test_cards_of_new_and_old_drivers(monkeypatch, answers, driver, card):
    """A driver that does not know a field refuses the whole query."""

    def answer(argv):
        field = argv[1].partition("=")[2].split(",")[0]
        return answers.get(field) if "query-gpu" in argv[1] else ""

    monkeypatch.setattr(cards_of, "run_command", answer)
    monkeypatch.setattr(cards_of.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    found = cards_of.list_gpus()
    card = dict(zip(("name", "uuid", "pci", "sm"), card))
    assert (found["driver"], found["cards"], found["error"]) == (driver, [card], None)
