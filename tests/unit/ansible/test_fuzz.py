"""Odd facts, texts, files and settings: whatever comes is used or refused in a sentence.

Each reader gets a thing as a good machine or user gives it, in which parts were changed at random,
so that it comes past the first look. The examples are the same in every run (derandomize).
"""

import copy
import functools
import json
import sys
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from planning import (
    PlanError,
    accept,
    accept_gpu,
    border,
    driver,
    driver_result,
    firewall,
    health,
    members,
    network,
    network_facts,
    preflight,
    share,
    stacks,
    toolkit,
    wake,
)
from planning.faults import network as network_faults
from tests.unit.ansible import driver_machines, test_network_plan, test_share_filters
from tests.unit.ansible.provision_machines import HEALTHY, QUESTION, ROOT, TABLE, load
from tests.unit.ansible.test_accept_filters import _results
from tests.unit.ansible.test_network_firewall_filters import SOCKETS
from tests.unit.ansible.test_toolkit_accept_gpu import GOOD
from tests.unit.ansible.test_toolkit_accept_gpu import TABLE as CARDS

filters = load("ansible/filter_plugins/tandem.py")
dry = load("ansible/dry_provision.py")
bootstrap = load("ansible/bootstrap.py")
verbs = load("tools/verbs.py")
FILTERS = filters.FilterModule().filters()
REFUSED = (PlanError, AnsibleFilterError)

DEEP = functools.reduce(lambda inner, _: [inner], range(600), "x")
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 7, 1 << 70, 10**400, 0.5, float("nan"), float("inf"), 1e300]),
    st.sampled_from(
        [
            "",
            "²",
            "٣",
            "9" * 5000,
            "\ud800",
            "\x1b]0;t\x07",
            "a\nb",
            "../x",
            "0.0.0.0/0",
            "-",
            "{{ x }}",
        ]
    ),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], {"": None}, DEEP, ["x"], {"a": {"b": []}}]),
)
SNIPPETS = st.one_of(
    st.sampled_from(
        ["", "\n", ":", "=", "[", "{", '"', "²", "9" * 5000, "/99", "via", "\t", "\x1b["]
    ),
    st.text(max_size=4),
)
quick = functools.partial(
    settings,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # to make an example smaller takes minutes
    suppress_health_check=list(HealthCheck),
)


def paths(value, at=()):
    """All places in a tree of mappings and lists."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*at, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from paths(item, (*at, place))


def changed(value):
    """The tree with up to three parts replaced, taken away, or changed within a text."""
    places = list(paths(value))
    change = st.tuples(
        st.sampled_from(places), st.integers(0, 3), ODD, st.integers(0, 99), SNIPPETS
    )
    return st.lists(change, max_size=3).map(lambda changes: _with(value, changes))


def _with(value, changes):
    value = [copy.deepcopy(value)]
    for at, kind, odd, where, snippet in changes:
        parent, (*way, last) = value, (0, *at)
        try:
            for key in way:
                parent = parent[key]
            part = parent[last]
        except (LookupError, TypeError):  # an earlier change took that away
            continue
        if not isinstance(parent, (dict, list)):
            continue
        if kind == 0 and at:
            del parent[last]
        elif kind == 1 and isinstance(part, str):
            parent[last] = part[:where] + snippet + part[where + 2 :]
        else:
            parent[last] = copy.deepcopy(odd) if at else odd
    return value[0] if value else None


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


@quick(max_examples=100)
@given(changed(GOOD_FACTS))
@example(GOOD_FACTS)
@example({**GOOD_FACTS, "disks": {}})
def test_facts_are_refused_or_planned_with(facts):
    known = refused_or(border.machine, facts, "pc1", "192.168.56.111", FOLDERS)
    own = refused_or(border.driver, facts, "pc1")
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
    network_faults.cluster(both)
    for wanted in ("auto", "cu102"):
        stack = refused_or(stacks.resolve, both, wanted, TABLE)
        refused_or(stacks.expected, both, wanted, TABLE)
        refused_or(toolkit.toolkit_plan, both, stack or STACK, WANTED, TABLE)
        refused_or(stacks.python_for, stack or STACK, known, "auto")
    refused_or(wake.wake_record, known, "192.168.56.111", 22)
    if own is None:
        return
    state = {**known, **own}
    for source in ("auto", "package", "runfile"):
        asked = {**driver_machines.WANTED, "source": source}
        refused_or(driver.driver_plan, state, asked, STACK, TABLE)
    driver_result.driver_hold(state, "535")
    driver_result.kernel_packages(state)
    smi = {"rc": 0, "text": "580.126.20"}
    driver_result.driver_outcome(state, "No such device", smi)


@quick(max_examples=25)
@given(st.data())
def test_what_accept_measured_is_refused_or_shown(data):
    sent = _results({"ab": 940, "ac": None, "bc": 940})
    results = []
    for one in sent:
        odd = data.draw(changed({"address": "10.0.0.1", **one}))
        results.append(refused_or(border.measured, odd, one["host"]))
    results = [one for one in results if one] or [{"address": "x", **sent[0]}]
    sums = accept.accept_allreduce([1.0], 10**8, results)
    for text in (*accept.accept_findings(results, sums), *accept.accept_table(results, sums)):
        assert isinstance(text, str)
    cards = refused_or(border.cards, data.draw(changed([GOOD, {"error": "no card"}])), "a")
    if cards is not None:
        accept_gpu.gpu_findings({"a": cards}, CARDS, sums)
        accept_gpu.gpu_table({"a": cards}, CARDS, sums, 10**8)


IP = json.dumps([
    {"ifname": "lo", "addr_info": []},
    {},
    {"ifname": "eth0", "mtu": 1500, "address": "52:54:00:12:34:56", "addr_info": [
        {"family": "inet", "local": "192.168.56.20", "prefixlen": 24, "dynamic": True},
        {"family": "inet6", "local": "fe80::1", "prefixlen": 64}]},
])  # fmt: skip
UFW, CHAINS = (
    "ENABLED=yes\n",
    "table inet tandem {\n\tchain input {\n type filter hook input; policy drop",
)
MOUNT = test_share_filters.mounted("ext4")
LSBLK = test_share_filters.LSBLK
JOURNAL = (
    "2026-11-20T10:00:00+0000 pc1 sshd[7]: Accepted publickey for anna from 10.20.0.8 port 5\n"
)
SETUP = {
    "interfaces": ["eth0", "docker0"],
    "eth0": {"pciid": "0000:01:00.0", "ipv4": {"address": "10.0.0.1", "prefix": "24"},
             "ipv6": [{"address": "fe80::1", "prefix": "64"}], "ipv4_secondaries": []},
    "docker0": {"interfaces": ["veth1"], "ipv4": {"address": "172.17.0.1", "prefix": "16"}},
}  # fmt: skip
# Of each filter that takes what a machine says: good arguments.
ASKED = {
    "accept_allreduce": ([1.0, 2.0], 10**8, _results({"ab": 940})),
    "card_facts": (IP, "eth0", "pc1"),
    "connection_end": ("192.168.56.1 40310 192.168.56.111 22",),
    "cut_off": (SOCKETS, "22", []),
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
    "share_disk": ("LABEL=Daten", LSBLK, True, "smb", "/srv/tandem/disk", "pc1"),
    "share_failure": ("nfs", "mount.nfs: access denied\n", "no such device"),
    "share_missing": ("/x", LSBLK),
    "share_options": ("smb", {"kernel": "6.1.0-1", "speed": 1000, "ids": "uid=1000(a) gid=7(a)"}),
    "share_refusal": ("nfs", "/x", MOUNT),
    "share_unit": ("/srv/tandem/data",),
    "ssh_cut_off": (
        "0 0 10.0.0.1:22 10.20.0.7:5022\n",
        JOURNAL,
        ["10.0.0.0/24"],
        SETUP,
    ),
    "wake_fault": ("\tSupports Wake-on: pumbg\n\tWake-on: g\n",),
    "wake_verdict": ("\tSupports Wake-on: g\n\tWake-on: g\n", ["enabled", "active"], "{}", {}),
    "wrong_names": ("10.0.0.1 STREAM pc1\n", {"pc1": "10.0.0.1"}),
}  # fmt: skip


def test_what_machines_say_to_filters_is_known():
    assert set(ASKED) == set(filters.SAID)


@pytest.mark.parametrize("name", ASKED)
@quick(max_examples=25)
@given(data=st.data())
def test_what_a_program_printed_is_refused_or_read(name, data):
    given = list(copy.deepcopy(ASKED[name]))
    for place in filters.SAID[name]:
        good = given[place]
        given[place] = data.draw(
            st.one_of(cut(good), ODD) if isinstance(good, str) else changed(good)
        )
    refused_or(FILTERS[f"tandem_{name}"], *given)


@quick(max_examples=25)
@given(changed(SETUP), changed({"firewalld.service": {"state": "running"}}))
def test_ansibles_own_facts_are_refused_or_read(setup, services):
    refused_or(firewall.container_bridges, setup)
    refused_or(firewall.card_networks, setup, "10.0.0.1")
    refused_or(firewall.ssh_cut_off, "0 0 10.0.0.1:22 10.20.0.7:5022\n", JOURNAL, [], setup)
    refused_or(firewall.other_firewall, services, UFW, CHAINS)


KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"  # RFC 8709's form


@quick(max_examples=25)
@given(changed({
    "ansible_facts": {
        "ssh_host_key_ed25519_public": KEY, "ssh_host_key_ed25519_public_keytype": "ssh-ed25519",
        "ssh_host_key_rsa_public": "AAAA", "ssh_host_key_rsa_public_keytype": "ssh-rsa"},
    "reach_answer": {"msg": "Failed to connect to the host via ssh: refused"}}))  # fmt: skip
def test_host_keys_are_refused_or_written(said):
    said = said if isinstance(said, dict) else {}
    variables = {"inventory_hostname": "pc1", "ansible_facts": said.get("ansible_facts")}
    found = refused_or(members.member, variables)
    if found:
        text = members.known_hosts_file("", [found])
        assert all(len(line.split()) == 3 for line in text.splitlines())
    answer = said.get("reach_answer")
    if isinstance(answer, dict):  # Ansible's own, of which the message is ssh's
        network_faults.set_aside({"inventory_hostname": "pc1", "reach_answer": answer})


MANAGERS = {
    "networkmanager": {"nmcli": test_network_plan.WIRED, "connection": "auto\n\n\n\n", "files": {
        "/etc/NetworkManager/system-connections/a":
            "[connection]\nuuid=6f1d-uuid\n[ipv4]\nroute1=1"}},
    "netplan": {"networkctl": test_network_plan.NETWORKD.replace("20-lan", "10-netplan-lan"),
                "files": {"/etc/netplan/50.yaml": test_network_plan.CLOUD_INIT + (
                    "      routes: [{to: default, via: 192.168.56.1}]\n"
                    "      nameservers: {addresses: [192.168.56.1]}\n"
                    "      addresses: [192.168.56.20/24, {'fe80::2/64': {lifetime: 0}}]\n")}},
    "networkd": {"networkctl": test_network_plan.NETWORKD, "files": {
        "/etc/systemd/network/20-lan.network":
            "[Match]\nName=eth0\n[Network]\nDHCP=yes\n[Route]\nGateway=192.168.56.1\n"}},
    "ifupdown": {"files": {"/etc/network/interfaces":
        "source /etc/network/interfaces.d/*\nauto eth0\niface eth0 inet dhcp\n  mtu 1400\n"}},
}  # fmt: skip
PRINTED = {
    "route": "default via 192.168.56.1 dev eth0 proto dhcp\n10.9.0.0/16 via 192.168.56.1 dev eth0\n"
    "blackhole 10.1.0.0/16\n",
    "resolv": "nameserver 127.0.0.1\nsearch lab\n",
    "card_dns": "Link 2 (eth0): 192.168.56.1\n",
    "card_search": "Link 2 (eth0): lab\n",
    "card_ip4": "IP4.DNS[1]:192.168.56.1\nIP4.DOMAIN[1]:lab\n",
    "leases": "lease {\n  fixed-address 192.168.56.20;\n"
    "  option domain-name-servers 192.168.56.1;\n"
    "  option rfc3442-classless-static-routes 16,10,9,192,168,56,1;\n}\n",
}


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize("manager", MANAGERS)
@quick(max_examples=25)
@given(data=st.data())
def test_a_network_is_refused_or_planned(manager, mode, data):
    ip = data.draw(cut(IP))
    card = refused_or(network_facts.card_facts, ip, "eth0", "pc1")
    said = copy.deepcopy(
        {"nmcli": "", "connection": "", "networkctl": "", **PRINTED, **MANAGERS[manager]}
    )
    for name in data.draw(st.sets(st.sampled_from(sorted(said)), max_size=3)):
        if name == "files":
            said["files"] = {path: data.draw(cut(text)) for path, text in said["files"].items()}
        else:
            said[name] = data.draw(st.one_of(cut(said[name]), ODD))
    good = network_facts.card_facts(IP, "eth0", "pc1")
    facts = {"host": "pc1", "interface": "eth0", "card": card or good, **said}
    want = {"mode": mode, "address": "192.168.56.111/24", "gateway": "", "dns": []}
    refused_or(network.network_plan, facts, want)


@quick(max_examples=25)
@given(data=st.data())
def test_lists_of_disks_and_cards_are_refused_or_read(data):
    lsblk = json.dumps(data.draw(changed(json.loads(LSBLK))))
    refused_or(share.share_missing, "/x", data.draw(cut(LSBLK)))
    refused_or(share.share_missing, "/x", lsblk)
    refused_or(share.share_disk, "LABEL=Daten", lsblk, True, "smb", "/srv", "pc1")
    findmnt = json.dumps(data.draw(changed(json.loads(MOUNT))))
    refused_or(share.share_refusal, "nfs", "/x", findmnt)
    ip = json.dumps(data.draw(changed(json.loads(IP))))
    refused_or(network_facts.card_facts, ip, "eth0", "pc1")
    refused_or(network_facts.interface_of, ip, "192.168.56.20", "pc1")


FACTS_FILE = json.loads((ROOT / "examples/machines/four-2080ti-one-office.json").read_text())[:2]


@quick(max_examples=25)
@given(odd=changed(FACTS_FILE), text=cut(json.dumps(FACTS_FILE[:1])))
def test_a_file_of_facts_is_refused_or_planned(tmp_path_factory, odd, text):
    path = tmp_path_factory.getbasetemp() / "facts.json"
    for written in (json.dumps(odd), text):
        path.write_text(written, errors="surrogatepass")
        try:
            dry.text(dry.rows(dry.read(path), TABLE, Path("/nowhere")))
        except (PlanError, dry.InspectionError) as error:
            assert str(error)


SAID = {
    "smi": {"done": True, "text": "0, 41, 18.52, RTX 2080 Ti\n1, ERR!, [N/A], x\nbad\n"},
    "errors": {"disks": {"sda": 3}, "xids": {"79": 1, "x": 2}},
    "ext4_errors": {"sdb": 1}, "kernel": "6.1.0-1", "waiting_kernel": "", "held": ["cuda"],
    "reboot_required": True, "disks": [{"folder": "/", "size": 10, "free": 5}, {"size": -1}],
}  # fmt: skip


@quick(max_examples=200)
@given(changed(SAID))
def test_how_a_machine_is_between_runs_is_read_or_not_known(said):
    row = health.health(said, "pc1")
    assert all(text.isprintable() for text in (row["kernel"], row["gpu_error"] or ""))
    for line in (*health.findings(row), *health.table([row])):
        assert line
    json.dumps(row, allow_nan=False).encode()


@quick(max_examples=25)
@given(
    st.one_of(
        st.text(max_size=20),
        cut("stack: cu126\n"),
        st.just("[" * 5000),
        st.just("2026-99-99"),
        st.just("#" * 70_000),
    )
)
def test_a_kept_stack_is_refused_or_read(text):
    refused_or(stacks.kept, text, "inventory.stack.yml")


@quick(max_examples=50)
@given(changed({
    "ansible_host": "192.168.56.111", "ansible_port": 22, "ansible_user": "admin",
    "train_user": "tandem", "address": "192.168.56.112/24", "other_addresses": "192.168.56.9",
    "release": "bookworm", "kernel": "6.1.0-1"}))  # fmt: skip
@example({"ansible_host": ["192.168.56.111"]})
def test_a_machines_variables_are_refused_or_used(variables):
    variables = variables if isinstance(variables, dict) else {}
    try:
        bootstrap.machine_of("pc1", variables)
    except bootstrap.BootstrapError as error:
        assert str(error)
    hostvars = {"pc1": {**variables, "inventory_hostname": "pc1"}}
    refused_or(FILTERS["tandem_member_addresses"], ["pc1"], hostvars)
    refused_or(FILTERS["tandem_address_conflicts"], ["pc1"], hostvars)
    refused_or(FILTERS["tandem_bundle_order"], hostvars, ["pc1"], "cpu")


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["~nosuchuser/x", "~", "/" * 5000, "a\0b", "-1", "'", "9" * 5000, "²", "latest"]
    ),
)


@pytest.mark.parametrize("verb", [name for name, verb in verbs.VERBS.items() if verb])
@quick(max_examples=12)
@given(data=st.data())
def test_a_verbs_variables_are_refused_or_become_options(verb, data):
    named = verbs.variables_of(verb)
    environment = {name: data.draw(WORDS) for name in named}
    try:
        verbs.check([verb], list(named), environment)
        words = verbs.options(verb, list(named), environment)
    except verbs.VerbError as error:
        assert str(error)
    else:
        assert all(isinstance(word, str) for word in words)


NAMES = st.one_of(
    st.sampled_from(["NODES", "nodes", "NODS", "GPUS", "LR", "EPOCH", "PYTHON", "x", "", "CORE"]),
    st.text(max_size=8),
)


@quick(max_examples=100)
@given(
    st.lists(st.sampled_from([*verbs.VERBS, "trian", "known", "²"]), max_size=2),
    st.dictionaries(NAMES, WORDS, max_size=3),
    st.booleans(),
)
def test_any_words_after_make_are_refused_or_known(typed, environment, given_there):
    given_there = list(environment) if given_there else []
    try:
        ignored = verbs.check(typed, given_there, environment)
    except verbs.VerbError as error:
        assert str(error)
    else:
        assert all(isinstance(line, str) for line in ignored)


@pytest.mark.parametrize("verb", [name for name, verb in verbs.VERBS.items() if verb])
@quick(max_examples=12)
@given(data=st.data())
def test_good_and_bad_values_of_a_verbs_variables(verb, data):
    named = verbs.variables_of(verb)
    texts = st.sampled_from(["", "4", "-1", "1", "no", "yes", "--lr '0.1", "--lr 0.1", "/x", "a"])
    environment = {
        name: data.draw(st.sampled_from([*variable.choices]) | texts if variable.choices else texts)
        for name, variable in named.items()
    }
    try:
        words = verbs.options(verb, list(named), environment)
    except verbs.VerbError as error:
        assert str(error)
    else:
        assert all(isinstance(word, str) for word in words)


def test_a_path_of_nobody_is_one_sentence():
    with pytest.raises(verbs.VerbError, match=r"^TO=~nosuchuser/x is no path: "):
        verbs.options("usb", ["TO"], {"TO": "~nosuchuser/x"})


def test_the_fuzzers_reach_every_line_of_the_border():
    """A thing that is refused at once proves nothing of what comes after."""
    reached = set()

    def note(frame, event, _):
        if frame.f_code.co_filename == border.__file__:
            reached.add((frame.f_code, frame.f_lineno))
            return note
        return None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        test_facts_are_refused_or_planned_with()
        test_what_accept_measured_is_refused_or_shown()
        test_lists_of_disks_and_cards_are_refused_or_read()
        test_ansibles_own_facts_are_refused_or_read()
        test_a_machines_variables_are_refused_or_used()
        recorded()
    finally:
        sys.settrace(before)
    lines = set()
    for thing in vars(border).values():
        code = getattr(thing, "__code__", None)
        if code and code.co_filename == border.__file__:
            lines |= {
                (code, line) for *_, line in code.co_lines() if line and line > code.co_firstlineno
            }
    missed = sorted((code.co_name, line) for code, line in lines - reached)
    assert len(lines) > 30 and not missed


@quick(max_examples=60)
@given(changed(FACTS_FILE[0]["facts"]))
@example({"host": "pc1"})
def recorded(facts):
    refused_or(border.recorded, facts)
