"""The plans of networks and machines."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lab import base, disk, network, node, plan, vm
from lab.plan import Lab, LabError, System

LAB = Lab("one", Path("/somewhere/tandem"), count=3, rate="1gbit")


def test_labs_share_no_name_outside_of_themselves():
    def outside(lab):
        names = {n.machine for n in lab.nodes} | {n.netns for n in lab.nodes}
        return names | {lab.netns("control"), lab.netns("stranger"), str(lab.state)}

    assert not outside(LAB) & outside(Lab("two", LAB.checkout, count=3))


def test_default_name_differs_by_checkout_and_is_valid():
    first, second = plan.default_name(Path("/tmp/a")), plan.default_name(Path("/root/a"))
    assert first != second
    assert plan.check_name(first) == first == plan.default_name(Path("/tmp/../tmp/a"))


def test_network_plan_keeps_out_of_the_host_namespace():
    for command in network.plan(LAB):
        words = shlex.split(command)
        assert words[:3] == ["ip", "netns", "add"] or words[1] == "-n" or "netns" in words[3:], (
            words
        )


def test_what_is_built_is_named_by_how_it_is_made(monkeypatch):
    names = [base.folder(one) for one in (System(), System("bullseye"), System(vm=True))]
    names.append(base.folder(System(packages=("one-more",))))
    names += [vm.folder(System(vm=True)), vm.folder(System(vm=True, packages=("dkms",)))]
    monkeypatch.setattr(base, "PACKAGES", (*base.PACKAGES, "one-more"))
    monkeypatch.setattr(vm, "DISK_SIZE", "8G")
    names += [base.folder(System(vm=True)), vm.folder(System(vm=True))]
    assert len(set(names)) == len(names)


def test_virtual_machines_hang_at_the_same_switch():
    virtual = replace(LAB, vm=True)
    taps = [c for c in network.plan(virtual) if "tuntap" in c]
    assert taps == [f"ip -n one-control tuntap add dev p{i} mode tap" for i in (1, 2, 3)]
    argv = [vm.machine(virtual, n) for n in virtual.nodes]
    assert all(f"ifname=p{i}" in " ".join(words) for i, words in enumerate(argv, start=1))
    cards = {word for words in argv for word in words if "mac=" in word}
    assert len(cards) == 3
    large = " ".join(vm.machine(replace(virtual, cpus=2, megabytes=1024), virtual.nodes[0]))
    assert "-smp 2 -m 1024" in large


def test_both_directions_of_a_cable_are_shaped():
    bucket = "root tbf rate 1gbit burst 250000 latency 50ms"
    shaped = network.shaping(LAB, LAB.nodes[0], "1gbit")
    assert shaped == [
        f"tc -n one-control qdisc replace dev p1 {bucket}",
        f"tc -n one-node1 qdisc replace dev eth0 {bucket}",
    ]
    assert set(shaped) <= set(network.plan(LAB))


def test_the_first_machine_of_a_release_alone_writes_its_environments():
    mixed = replace(LAB, releases=("bookworm", "bullseye", "bullseye"))
    binds = [word for n in mixed.nodes for word in node.container(mixed, n) if "envs" in word]
    assert [bind.split("=")[0] for bind in binds] == ["--bind", "--bind", "--bind-ro"]


def test_hosts_file_has_the_line_that_roles_must_mend():
    _, content = disk.files(LAB, LAB.nodes[1])["etc/hosts"]
    assert "127.0.1.1\tnode2\n" in content


@pytest.mark.parametrize("index", [0, 4])
def test_a_lab_of_three_has_no_other_node(index):
    with pytest.raises(LabError):
        LAB.node(index)
