"""Judge machines by what their shell prints, before Ansible's modules run on them. Pure functions.

Role reach runs a few shell commands on each machine by `raw`, which needs no Python there. These
functions find machines that no role could provision, or only another ansible-core.
"""

import re

from boundary.facts import Printed

from . import reading, stacks
from .faults import machine

# 'arch=x86_64', 'python=3.10.12', or of /etc/os-release 'VERSION_ID="22.04"'; raw may add a \r.
LINE = re.compile(
    r'^(arch|kernel|container|python|ID|ID_LIKE|VERSION_ID)="?([\w.+ -]{0,80})"?\r?$', re.MULTILINE
)
NAMES = {"ID": "distribution", "VERSION_ID": "release", "ID_LIKE": "like"}
# The Ansible for old machines, and the oldest and newest Python of machines that it supports.
# source: the support matrix in docs.ansible.com, "Releases and maintenance", ansible-core 2.16.
OLDER_CORE, OLDEST_PYTHON, NEWEST_PYTHON = "2.16", (3, 6), (3, 12)
# Another Ansible, or a package, removes these faults, so the GPUs of such machines count.
REMEDIABLE = ("python", "no_python")


def looks(machines):
    """List the facts of the machines that answered role reach's `raw`; machines: their variables.

    The list omits the control node, and machines whose shell printed no fact.
    """
    answers = [
        (
            host_vars["inventory_hostname"],
            host_vars.get("driver_policy"),
            host_vars.get("reach_answer", {}),
        )
        for host_vars in machines
        if host_vars.get("ansible_connection") != "local"
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
    """Find the machines that no role can provision, or that ansible-core `core` cannot manage."""
    findings, machines = [], [reading.as_shell_facts(facts) for facts in machines]
    for facts in machines:
        # Only the Python of a machine depends on the version of Ansible.
        rows = [*machine.check_support(facts), *machine.check_python(facts, core)]
        findings += [
            {"host": facts.host, "fault": fault, "cause": cause,
             "remedy": _old_python_remedy(machines, core) if fault == "python" else remedy}
            for fault, cause, remedy in rows
        ]  # fmt: skip
    return findings


def _has_old_python(facts, core):
    return any(row[0] == "python" for row in machine.check_python(facts, core))


def _old_python_remedy(machines, core):
    """Choose the remedy if some machines have a Python that is too old for `core`."""
    if all(OLDEST_PYTHON <= _python_version(facts) <= NEWEST_PYTHON for facts in machines):
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
        return (
            "`make provision CORE=2.16` provisions all machines that answer, because that "
            f"Ansible supports Python {oldest} to {newest}"
        )
    # No ansible-core manages all of them, so the old and the new machines need separate calls.
    old_hosts = [facts.host for facts in machines if _has_old_python(facts, core)]
    other_hosts = [facts.host for facts in machines if facts.host not in old_hosts]
    return (
        f"`make provision CORE=2.16 LIMIT={','.join(old_hosts)}`, then `make provision "
        f"LIMIT={','.join(other_hosts)}`, with stack: NAME in group_vars/all.yml, because "
        "auto chooses for all machines at once; or install a newer release on it"
    )


def older_core(machines, core):
    """Name the older ansible-core that every machine needs; "" if some do not."""
    machines = [reading.as_shell_facts(facts) for facts in machines]
    old_machines = [
        facts
        for facts in machines
        if _has_old_python(facts, core) and _python_version(facts) >= OLDEST_PYTHON
    ]
    return OLDER_CORE if machines and len(old_machines) == len(machines) else ""


def _python_version(facts):
    """Return (major, minor) of the machine's Python; (0,) if it has none."""
    return stacks.parse_version(facts.python or "0")[:2]
