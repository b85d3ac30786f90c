"""The plans of networks and machines."""

import shlex
from pathlib import Path

from lab import base, network, vm
from lab.plan import Lab, System

LAB = Lab("one", Path("/somewhere/tandem"), count=3, rate="1gbit")


def test_labs_share_no_name_outside_of_themselves():
    def outside(lab):
        names = {n.machine for n in lab.nodes} | {n.netns for n in lab.nodes}
        return names | {lab.netns("control"), lab.netns("stranger"), str(lab.state)}

    assert not outside(LAB) & outside(Lab("two", LAB.checkout, count=3))


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


def test_both_directions_of_a_cable_are_shaped():
    bucket = "root tbf rate 1gbit burst 250000 latency 50ms"
    shaped = network.shaping(LAB, LAB.nodes[0], "1gbit")
    assert shaped == [
        f"tc -n one-control qdisc replace dev p1 {bucket}",
        f"tc -n one-node1 qdisc replace dev eth0 {bucket}",
    ]
    assert set(shaped) <= set(network.plan(LAB))
