"""Read a machine's shell before Ansible's modules run on it. Pure functions."""

import re

from boundary.facts import Printed

from . import reading, stacks
from .faults import machine

LINE = re.compile(
    r'^(arch|kernel|container|python|ID|ID_LIKE|VERSION_ID)="?([\w.+ -]{0,80})"?\r?$', re.MULTILINE
)
NAMES = {"ID": "distribution", "VERSION_ID": "release", "ID_LIKE": "like"}
# The Ansible for old machines, and the Pythons of machines that it supports. source: the support
# matrix in docs.ansible.com, "Releases and maintenance", ansible-core 2.16.
OLDER, OLDEST, NEWEST = "2.16", (3, 6), (3, 12)
# Another Ansible, or a package, removes these faults. The GPUs of such machines count.
REMEDIABLE = ("python", "no_python")


def looks(machines):
    """List the facts of the machines that answered role reach's `raw`.

    Without the control node, and machines whose shell prints none of these facts: Ansible's
    modules read them.
    """
    answers = [
        (m["inventory_hostname"], m.get("driver_policy"), m.get("reach_answer", {}))
        for m in machines
        if m.get("ansible_connection") != "local"
    ]
    return [
        {"host": host, **facts, "driver_kept": policy == "keep"}
        for host, policy, answer in answers
        if not answer.get("unreachable")
        for facts in [look(reading.read(answer.get("stdout", ""), Printed, host))]
        if facts
    ]


def look(answer):
    """Read {"arch", "kernel", "python", "distribution", "release", "like", "container"} as texts.

    Returns {} for an answer without "arch".
    """
    facts = {NAMES.get(name, name): value.strip() for name, value in LINE.findall(answer)}
    if not facts.get("arch"):
        return {}
    return {**dict.fromkeys((*NAMES.values(), "kernel", "container", "python"), ""), **facts}


def unfit(machines, core):
    """Find the machines that no role can provision, or not by ansible-core `core`."""
    findings, machines = [], [reading.shell(facts) for facts in machines]
    for facts in machines:
        # Only the Python of a machine depends on the version of Ansible.
        rows = [*machine.impossible(facts), *machine.python(facts, core)]
        is_old = any(row[0] == "python" for row in rows)
        findings += [
            {"host": facts.host, "fault": fault, "cause": cause,
             "remedy": _old_python_remedy(machines, core) if is_old and fault == "python"
             else remedy}
            for fault, cause, remedy in rows
        ]  # fmt: skip
    return findings


def _has_old_python(facts, core):
    return any(row[0] == "python" for row in machine.python(facts, core))


def _old_python_remedy(machines, core):
    """Word how to provision machines of which some are too old for `core`."""
    if all(OLDEST <= _python(facts) <= NEWEST for facts in machines):
        return (
            "`make provision CORE=2.16` provisions all machines that answer, because that "
            f"Ansible supports Python {_text(OLDEST)} to {_text(NEWEST)}"
        )
    old_hosts = [facts.host for facts in machines if _has_old_python(facts, core)]
    other_hosts = [facts.host for facts in machines if facts.host not in old_hosts]
    return (
        f"`make provision CORE=2.16 LIMIT={','.join(old_hosts)}`, then `make provision "
        f"LIMIT={','.join(other_hosts)}`, with stack: NAME in group_vars/all.yml, because "
        "auto chooses for all machines at once; or install a newer release on it"
    )


def older_core(machines, core):
    """Name the older ansible-core that every machine needs; "" if some do not."""
    machines = [reading.shell(facts) for facts in machines]
    old_machines = [
        facts for facts in machines if _has_old_python(facts, core) and _python(facts) >= OLDEST
    ]
    return OLDER if machines and len(old_machines) == len(machines) else ""


def _python(facts):
    return stacks.version(facts.python or "0")[:2]


def _text(version):
    return ".".join(map(str, version))
