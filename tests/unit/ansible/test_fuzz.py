"""Odd facts, texts, files and settings: whatever comes is used or refused in a sentence.

Each reader gets a thing as a good machine or user gives it, in which parts were changed at random,
so that it comes past the first look.
"""

import copy
import json
from pathlib import Path

from ansible.errors import AnsibleFilterError
from hypothesis import example, given
from hypothesis import strategies as st

from contract.errors import UserError
from planning import (
    PlanError,
    driver,
    driver_result,
    firewall,
    looks,
    members,
    network,
    network_facts,
    preflight,
    reading,
    stacks,
    toolkit,
    wake,
)
from planning.faults import network as network_faults
from tests.fuzz import PLAIN, many, odd
from tests.unit.ansible import driver_machines, test_share_filters
from tests.unit.ansible.provision_machines import HEALTHY, QUESTION, ROOT, TABLE, load
from tests.unit.ansible.test_network_firewall_filters import SOCKETS
from tests.unit.ansible.test_network_plan import PLANS

filters = load("ansible/filter_plugins/tandem.py")
dry = load("ansible/dry_provision.py")
bootstrap = load("ansible/bootstrap.py")
FILTERS = filters.FilterModule().filters()
REFUSED = (PlanError, AnsibleFilterError)
SNIPPETS = st.one_of(
    st.sampled_from(
        ["", "\n", ":", "=", "[", "{", '"', "²", "9" * 5000, "/99", "via", "\t", "\x1b["]
    ),
    st.text(max_size=4),
)
VALUES = st.sampled_from(PLAIN) | st.text(max_size=8)


@st.composite
def cut(draw, text):
    """The text with something else in some places."""
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + draw(SNIPPETS) + text[end:]
    return text


def refused_or(function, *arguments):
    """What a reader or planner makes of it; None where it says in a sentence why not."""
    try:
        return function(*arguments)
    except REFUSED as error:
        assert 10 < len(str(error)) < 20_000
        return None


FOLDERS = tuple(row["folder"] for row in QUESTION["space"])
STACK = {**TABLE["rows"]["cu102"], "name": "cu102"}
WANTED = {"toolkit": "auto", "apex": "auto", "apex_extensions": "auto"}
KNOWN = {**HEALTHY, "host": "pc9"}
GOOD_FACTS = driver_machines.facts(
    "debian11",
    offered=driver_machines.DEBIAN12,
    apt_lock={"pid": 7, "command": "apt"},
    missing_mounts=[{"path": "/data", "type": "nfs4"}],
    held_since=1.0,
)


@many(100)
@given(odd(GOOD_FACTS))
@example(GOOD_FACTS)
@example({**GOOD_FACTS, "disks": {}})
def test_facts_are_refused_or_planned_with(facts):
    known = refused_or(reading.machine, facts, "pc1", "192.168.56.111", FOLDERS)
    own = refused_or(reading.driver, facts, "pc1")
    if known is None:
        return
    known["sudo"] = True
    json.dumps(known).encode()
    both = [known, KNOWN]
    cards = any(gpu["vendor"] == stacks.NVIDIA for gpu in known["gpus"])
    for question in (QUESTION, {**QUESTION, "provisioned": True, "stack": "cu126"}):
        if cards and own is None:  # as role preflight has it: nothing could be collected
            break
        known = {**known, **(own or {})}
        for finding in refused_or(preflight.findings, known, question) or ():
            preflight.text(finding)
    network_faults.check_cluster(both)
    for wanted in ("auto", "cu102"):
        stack = refused_or(stacks.resolve, both, wanted, TABLE)
        refused_or(stacks.predict_stack, both, wanted, TABLE)
        refused_or(toolkit.toolkit_plan, both, stack or STACK, WANTED, TABLE)
        refused_or(
            stacks.choose_environment, stack or STACK, reading.as_machine_facts(known), "auto"
        )
    refused_or(wake.wake_record, known, "192.168.56.111", 22)
    if own is None:
        return
    state = {**known, **own}
    for source in ("auto", "package", "runfile"):
        asked = {**driver_machines.WANTED, "source": source}
        refused_or(driver.driver_plan, state, asked, STACK, TABLE)
    refused_or(driver_result.driver_hold, state, "535", driver_machines.WANTED, STACK)
    driver_result.kernel_packages(state)
    smi = {"rc": 0, "text": "580.126.20"}
    driver_result.driver_outcome(state, "No such device", smi)


IP = json.dumps([
    {"ifname": "lo", "addr_info": []},
    {},
    {"ifname": "eth0", "mtu": 1500, "address": "52:54:00:12:34:56", "addr_info": [
        {"family": "inet", "local": "192.168.56.20", "prefixlen": 24, "dynamic": True},
        {"family": "inet6", "local": "fe80::1", "prefixlen": 64}]},
])  # fmt: skip
UFW, CHAINS = (
    "ENABLED=yes\n",
    "table inet t {\n\tchain input {\n type filter hook input; policy drop",
)
MOUNT, LSBLK = test_share_filters.mounted("ext4"), test_share_filters.LSBLK
SSH = "0 0 10.0.0.1:22 10.20.0.7:5022\n"
JOURNAL = "2026-11-20T10:00:00+0000 pc1 sshd[7]: Accepted publickey for a from 10.20.0.8 port 5\n"
SETUP = {
    "interfaces": ["eth0", "docker0"],
    "eth0": {"pciid": "0000:01:00.0", "ipv4": {"address": "10.0.0.1", "prefix": "24"},
             "ipv6": [{"address": "fe80::1", "prefix": "64"}], "ipv4_secondaries": []},
    "docker0": {"interfaces": ["veth1"], "ipv4": {"address": "172.17.0.1", "prefix": "16"}},
}  # fmt: skip
LISTING = json.dumps(
    {"files": {"classes": 0, "images": 3, "bytes": 10, "sha256": 64 * "a", "note": ""}}
)
# Of each filter that takes what a machine says: good arguments.
ASKED = {
    "interface_facts": (IP, "eth0", "pc1"),
    "read_ssh_connection": ("192.168.56.1 40310 192.168.56.111 22",),
    "find_cut_off_listeners": (SOCKETS, "22", []),
    "data_lack": (["x"], [["<f+++++++++ a"]], "Avail\n2000\n", "/nowhere", "/srv/tandem"),
    "data_loss": ("coco", LISTING, LISTING),
    "driver_outcome": (GOOD_FACTS, "No such device", {"rc": 0, "text": "580.126.20"}),
    "former_hosts_file": ("127.0.0.1 localhost\n# tandem replaced: 127.0.1.1 pc1\n",),
    "hosts_file": ("127.0.0.1 localhost\n127.0.1.1 pc1\n", {"pc1": "10.0.0.1"}),
    "interface_of": (IP, "192.168.56.20", "pc1"),
    "known_hosts_file": ("pc1,10.0.0.1 ssh-ed25519 AAAA\n", [{"names": ["pc1"], "keys": []}]),
    "linux_again": (
        "menuentry 'Linux' --class gnu-linux {\n}\nmenuentry 'W' --class windows {\n",
        "BootCurrent: 0001\nBootOrder: 0002,0001\n",
    ),
    "other_firewall": ({"firewalld.service": {"state": "running"}}, UFW, CHAINS),
    "packages_planned": ("Inst chrony (4.3 Debian)\nInst libc6 [2.36] (2.37)\n",),
    "parse_files": ("/etc/a:b\n/etc/a:c\n",),
    "power_plan": ("pc1", True, 200, "RTX 2080 Ti, 100.00, 280.00, 250.00, Enabled\n"),
    "share_cache": (200, "Type 1B-blocks Avail\next4 1000000000000 500000000000\n", "0 /x", True),
    "share_disk": ("LABEL=Daten", LSBLK, True, "smb", "/srv/tandem/disk", "pc1"),
    "share_failure": ("nfs", "mount.nfs: access denied\n", "no such device"),
    "share_missing": ("/x", LSBLK),
    "share_options": ("smb", {"kernel": "6.1.0-1", "speed": 1000, "ids": "uid=1000(a) gid=7(a)"}),
    "share_refusal": ("nfs", "/x", MOUNT),
    "share_unit": ("/srv/tandem/data",),
    "find_cut_off_peers": (SSH, JOURNAL, ["10.0.0.0/24"], SETUP),
    "wake_fault": ("\tSupports Wake-on: pumbg\n\tWake-on: g\n",),
    "wake_verdict": ("\tSupports Wake-on: g\n\tWake-on: g\n", ["enabled", "active"], "{}", {}),
    "wrong_names": ("10.0.0.1 STREAM pc1\n", {"pc1": "10.0.0.1"}),
}  # fmt: skip


def test_what_machines_say_to_filters_is_known():
    assert set(ASKED) == set(filters.SHAPES)


def changed(good):
    """What was printed with something else in some places, also within the document that it is."""
    if not isinstance(good, str):
        return odd(good)
    if good.lstrip().startswith(("{", "[")):
        return odd(json.loads(good)).map(json.dumps) | cut(good) | VALUES
    return cut(good) | VALUES


@many(600)
@given(data=st.data())
def test_what_a_program_printed_is_refused_or_read(data):
    name = data.draw(st.sampled_from([*ASKED]))
    given = list(copy.deepcopy(ASKED[name]))
    for place in filters.SHAPES[name]:
        good = given[place]
        given[place] = data.draw(changed(good))
    refused_or(FILTERS[f"tandem_{name}"], *given)


@many(100)
@given(odd(SETUP), odd({"firewalld.service": {"state": "running"}}))
def test_ansibles_own_facts_are_refused_or_read(setup, services):
    refused_or(firewall.container_bridges, setup)
    refused_or(firewall.interface_networks, setup, "10.0.0.1")
    refused_or(firewall.find_cut_off_peers, SSH, JOURNAL, [], setup)
    refused_or(firewall.other_firewall, services, UFW, CHAINS)


KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"  # RFC 8709's form


@many(25)
@given(odd({
    "ansible_facts": {
        "ssh_host_key_ed25519_public": KEY, "ssh_host_key_ed25519_public_keytype": "ssh-ed25519",
        "ssh_host_key_rsa_public": "AAAA", "ssh_host_key_rsa_public_keytype": "ssh-rsa"},
    "reach_answer": {"msg": "Failed to connect to the host via ssh: refused"}}))  # fmt: skip
def test_host_keys_are_refused_or_written(said):
    variables = {"inventory_hostname": "pc1", "ansible_facts": said.get("ansible_facts")}
    found = refused_or(members.member, variables)
    if found:
        text = members.known_hosts_file("", [found])
        assert all(len(line.split()) == 3 for line in text.splitlines())
    answer = said.get("reach_answer")
    if isinstance(answer, dict):  # Ansible's own, of which the message is ssh's
        network_faults.describe_skipped({"inventory_hostname": "pc1", "reach_answer": answer})


@many(100)
@given(st.lists(st.sampled_from(("arch", "kernel", "container", "python", "ID", "VERSION_ID"))
       .flatmap(lambda name: st.text(max_size=12).map(lambda said: f"{name}={said}"))))  # fmt: skip
@example(["arch=x86_64", "python=", "ID=ubuntu", "VERSION_ID=1."])
@example(["arch=x86_64", "python=3..6", "ID=debian", "VERSION_ID=x"])
def test_what_a_shell_says_is_a_machine_or_none(lines):
    machines = [{"inventory_hostname": "pc1", "reach_answer": {"stdout": "\n".join(lines)}}]
    seen = refused_or(looks.looks, machines) or []
    refused_or(looks.unfit, seen, "2.19.5")
    refused_or(looks.older_core, seen, "2.19.5")


@many(50)
@given(odd({"rc": 0, "stdout": '{"names": ["x"], "precisions": ["fp32"]}'}))
def test_what_is_no_proof_counts_for_none(said):
    done = said if isinstance(said, dict) else {}
    assert len(reading.proven([{"inventory_hostname": "pc1", "prove_cards": done}])) <= 1


@many(200)
@given(data=st.data())
def test_a_network_is_refused_or_planned(data):
    facts, want = copy.deepcopy(data.draw(st.sampled_from([*PLANS.values()])))
    printed = data.draw(cut(IP))
    card = refused_or(network_facts.interface_facts, printed, facts["interface"], "pc1")
    facts["card"] = card or facts["card"]
    for name in data.draw(st.sets(st.sampled_from([*network.PRINTED, "files"]), max_size=3)):
        if name == "files":
            facts["files"] = {path: data.draw(cut(text)) for path, text in facts["files"].items()}
        else:
            facts[name] = data.draw(cut(facts[name]) | VALUES)
    refused_or(network.network_plan, facts, want)


FACTS_FILE = json.loads((ROOT / "examples/machines/four-2080ti-one-office.json").read_text())[:2]


@many(25)
@given(said=odd(FACTS_FILE), text=cut(json.dumps(FACTS_FILE[:1])))
def test_a_file_of_facts_is_refused_or_planned(tmp_path_factory, said, text):
    path = tmp_path_factory.getbasetemp() / "facts.json"
    for written in (json.dumps(said), text):
        path.write_text(written, errors="surrogatepass")
        try:
            dry.format_rows(dry.plan_rows(dry.read_facts_file(path), TABLE, Path("/nowhere")))
        except (PlanError, UserError) as error:
            assert str(error)


@many(50)
@given(st.text(max_size=20) | cut("stack: cu126\n"))
@example("[" * 500)
@example("2026-99-99")
@example("#" * 70_000)
def test_a_kept_stack_is_refused_or_read(text):
    refused_or(stacks.read_decision, text, "inventory.stack.yml")


@many(50)
@given(odd({
    "ansible_host": "192.168.56.111", "ansible_port": 22, "ansible_user": "admin",
    "train_user": "tandem", "address": "192.168.56.112/24", "other_addresses": "192.168.56.9",
    "release": "bookworm", "kernel": "6.1.0-1"}))  # fmt: skip
@example({"ansible_host": ["192.168.56.111"]})
def test_a_machines_variables_are_refused_or_used(variables):
    try:
        bootstrap.make_machine("pc1", variables)
    except UserError as error:
        assert str(error)
    hostvars = {"pc1": {**variables, "inventory_hostname": "pc1"}}
    refused_or(FILTERS["tandem_member_addresses"], ["pc1"], hostvars)
    refused_or(FILTERS["tandem_address_conflicts"], ["pc1"], hostvars)
    refused_or(FILTERS["tandem_bundle_order"], hostvars, ["pc1"], "cpu")
