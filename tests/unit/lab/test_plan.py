"""Names, addresses, rates and the plans made of them."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lab import base, disk, network, node, plan, vm
from lab.plan import Lab, LabError, System

LAB = Lab("one", Path("/somewhere/tandem"), count=3, rate="1gbit")


def test_addresses_follow_the_shipped_inventory():
    assert [n.address for n in LAB.nodes] == ["192.168.56.111", "192.168.56.112", "192.168.56.113"]
    assert [n.name for n in LAB.nodes] == ["node1", "node2", "node3"]


def test_most_nodes_stay_below_the_stranger():
    last = Lab("one", Path("/x"), count=plan.check_count(plan.MAX_NODES)).nodes[-1]
    assert int(last.address.rsplit(".", 1)[1]) < int(plan.STRANGER_ADDRESS.rsplit(".", 1)[1])


def test_labs_share_no_name_outside_of_themselves():
    def outside(lab):
        names = {n.machine for n in lab.nodes} | {n.netns for n in lab.nodes}
        return names | {lab.netns("control"), lab.netns("stranger"), str(lab.state)}

    assert not outside(LAB) & outside(Lab("two", LAB.checkout, count=3))


def test_default_name_differs_by_checkout_and_is_valid():
    first, second = plan.default_name(Path("/tmp/a")), plan.default_name(Path("/root/a"))
    assert first != second
    assert plan.check_name(first) == first == plan.default_name(Path("/tmp/../tmp/a"))


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        *((plan.check_name, name) for name in ("", "a/b", "-x", "A", "x" * 33, "a b", "../up")),
        *((plan.check_count, count) for count in (0, -1, 65)),
        *((plan.check_rate, rate) for rate in ("1", "1gb", "fast", "1gbit;x", "0mbit", "-1gbit")),
        *((LAB.node, index) for index in (0, 4)),
    ],
)
def test_what_is_no_name_count_rate_or_node_is_refused(check, bad):
    with pytest.raises(LabError):
        check(bad)


def test_rates():
    assert plan.check_rate("2.5gbit") == "2.5gbit"
    assert plan.check_rate("unshaped") is None
    assert plan.bits_per_second("2.5gbit") == 2.5e9
    assert plan.burst_bytes("1gbit") == 250_000
    # 64 KiB in packets of 1448 bytes, with 66 of headers each.
    assert plan.burst_bytes("10mbit") >= 65536 + 46 * 66


def test_network_plan_keeps_out_of_the_host_namespace():
    for command in network.plan(LAB):
        words = shlex.split(command)
        assert words[:3] == ["ip", "netns", "add"] or words[1] == "-n" or "netns" in words[3:], (
            words
        )


def test_network_plan_has_no_way_out():
    assert not [c for c in network.plan(LAB) if "route" in c or "via" in c]


def test_both_directions_of_a_cable_are_shaped():
    first = LAB.nodes[0]
    bucket = "root tbf rate 1gbit burst 250000 latency 50ms"
    shaped = network.shaping(LAB, first, "1gbit")
    assert shaped == [
        f"tc -n one-control qdisc replace dev p1 {bucket}",
        f"tc -n one-node1 qdisc replace dev eth0 {bucket}",
    ]
    assert set(shaped) <= set(network.plan(LAB))
    assert all(c.endswith("root noqueue") for c in network.shaping(LAB, first, None))


@pytest.mark.parametrize("text", ["1gbit", "2.5gbit", "100mbit", "512kbit"])
def test_rate_is_shown_as_it_was_given(text):
    assert network.rate_text(round(plan.bits_per_second(text))) == text


def test_each_release_has_a_first_machine():
    mixed = replace(LAB, releases=("bookworm", "bullseye", "bullseye"))
    binds = [word for n in mixed.nodes for word in node.container(mixed, n) if "envs" in word]
    assert [b.split("=")[0] for b in binds] == ["--bind", "--bind", "--bind-ro"]


def test_what_is_built_is_named_by_how_it_is_made(monkeypatch):
    names = [base.folder(one) for one in (System(), System("bullseye"), System(vm=True))]
    names.append(base.folder(System(packages=("one-more",))))
    names += [vm.folder(System(vm=True)), vm.folder(System(vm=True, packages=("dkms",)))]
    monkeypatch.setattr(base, "PACKAGES", (*base.PACKAGES, "one-more"))
    monkeypatch.setattr(vm, "DISK_SIZE", "8G")
    names += [base.folder(System(vm=True)), vm.folder(System(vm=True))]
    assert len(set(names)) == len(names)


def test_releases_are_one_for_all_or_one_for_each():
    mixed = replace(LAB, releases=plan.check_releases("bullseye,bookworm,bullseye", 3))
    assert [n.system.release for n in mixed.nodes] == ["bullseye", "bookworm", "bullseye"]
    assert [n.envs.name for n in mixed.nodes] == ["bullseye", "bookworm", "bullseye"]
    older = replace(LAB, releases=plan.check_releases("bullseye", 3))
    assert {n.system.release for n in older.nodes} == {"bullseye"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bookworm,bullseye", "2 releases for 3 nodes: name one for all, or one for each node"),
        ("potato", "release 'potato': a lab has one of bookworm, bullseye, trixie"),
        ("bookworm,", "release '': a lab has one of bookworm, bullseye, trixie"),
    ],
)
def test_bad_releases_are_refused(text, sentence):
    with pytest.raises(LabError, match=sentence):
        plan.check_releases(text, 3)


def test_packages_make_the_same_base_in_any_order():
    assert plan.check_packages("gcc,dkms,gcc") == ("dkms", "gcc") == plan.check_packages("dkms,gcc")
    with pytest.raises(LabError, match="not the name of a Debian package"):
        plan.check_packages("gcc,--foreign")


def test_hardware_is_of_virtual_machines():
    assert plan.check_hardware(True, None, None) == (1, plan.MACHINE_MEGABYTES)
    assert plan.check_hardware(True, 2, 1024) == (2, 1024)
    assert plan.check_hardware(False, None, None)
    for vm_, cpus, megabytes, sentence in (
        (False, 2, None, "for virtual machines"),
        (True, 0, None, "at least 1 processor, not 0"),
        (True, 1, 64, "at least 384 MB of memory, not 64"),
    ):
        with pytest.raises(LabError, match=sentence):
            plan.check_hardware(vm_, cpus, megabytes)


def test_hosts_file_has_the_line_that_roles_must_mend():
    _, content = disk.files(LAB, LAB.nodes[1])["etc/hosts"]
    assert "127.0.1.1\tnode2\n" in content


def test_accounts():
    passwd = {"passwd": "root:x:0:0::/root:/bin/sh\n", "shadow": "root:*:1::::::\n", "group": ""}
    made = disk.accounts(LAB, passwd)
    assert made["passwd"].splitlines()[1] == "tandem:x:1000:1000::/home/tandem:/bin/bash"
    assert made["shadow"].splitlines()[1].startswith("tandem:*:")  # keys only
    assert made["passwd"].splitlines()[2].startswith("tandem-admin:x:1001:1001:")
    bare = disk.accounts(Lab("one", LAB.checkout, bare=True), passwd)
    assert bare["shadow"].splitlines()[1].startswith("student:$6$")


def test_sudo_asks_for_a_password_only_where_nothing_was_prepared():
    bare = Lab("one", LAB.checkout, bare=True)
    prepared = disk.files(LAB, LAB.nodes[0])["etc/sudoers.d/tandem"][1].splitlines()
    assert [rule.split()[0] for rule in prepared if "NOPASSWD" in rule] == [
        "tandem",
        "tandem-admin",
    ]
    assert "NOPASSWD" not in disk.files(bare, bare.nodes[0])["etc/sudoers.d/student"][1]


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
