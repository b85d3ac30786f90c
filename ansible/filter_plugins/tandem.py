"""The filters of roles and playbooks: names for the functions of ansible/planning/.

All begin with `tandem_`, and each is used by a role or a playbook.
"""

import functools
import shutil
import sys
from pathlib import Path

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean

# Ansible loads this file by its path, and by no package: so here, and nowhere else, Python is told
# where planning/, contract/ and launcher/ are. At the end of the list, where they hide no module.
sys.path += map(str, Path(__file__).resolve().parents[1:3])

from contract.machines import CLOCK_TOLERANCE
from planning import (
    PlanError,
    accept,
    accept_gpu,
    boot,
    border,
    clock,
    data,
    driver,
    driver_power,
    driver_result,
    firewall,
    health,
    looks,
    members,
    network,
    network_facts,
    offline,
    packages,
    preflight,
    share,
    stacks,
    toolkit,
    wake,
)
from planning.faults import network as network_faults


def offline_hosts(hostvars, hosts):
    """The hosts that have offline=true, in any of the words that Ansible takes for it."""
    return [host for host in hosts if boolean(hostvars[host].get("offline", False), strict=False)]


def findings(facts, question):
    """See planning/preflight.py; clocks may differ by as much as in a run."""
    return preflight.findings(facts, {**question, "clock_tolerance": CLOCK_TOLERANCE})


def python_of(stack, machine, manager):
    """{"manager", "python"} of a machine's environment."""
    return dict(zip(("manager", "python"), stacks.python_for(stack, machine, manager)))


def older_core(answers, core):
    """See planning/looks.py; "" where this control machine has no Python for it."""
    names = ("python3.12", "python3.11", "python3.10")
    here = (3, 10) <= sys.version_info < (3, 13) or any(map(shutil.which, names))
    return looks.older_core(answers, core) if here else ""


FILTERS = {
    "accept_cards": border.cards,
    "accept_result": border.measured,
    "accept_allreduce": accept.accept_allreduce,
    "accept_findings": accept.accept_findings,
    "accept_pairs": accept.accept_pairs,
    "accept_table": accept.accept_table,
    "accept_turns": accept.accept_turns,
    "address_conflicts": network_facts.address_conflicts,
    "bundle_needed": offline.bundle_needed,
    "bundle_order": offline.bundle_order,
    "by_family": firewall.by_family,
    "cards": stacks.counting,
    "card_networks": firewall.card_networks,
    "card_facts": network_facts.card_facts,
    "clock_server": clock.clock_server,
    "clock_servers_fault": clock.clock_servers_fault,
    "cluster_findings": network_faults.cluster,
    "connection_end": firewall.connection_end,
    "container_bridges": firewall.container_bridges,
    "cut_off": firewall.cut_off,
    "data_refusal": data.data_refusal,
    "driver_facts": border.driver,
    "driver_hold": driver_result.driver_hold,
    "driver_outcome": driver_result.driver_outcome,
    "driver_plan": driver.driver_plan,
    "driver_reboot_refused": driver_result.reboot_refused,
    "driver_upgrade": driver.upgrade_plan,
    "driver_wanted": driver.driver_wanted,
    "expected_stack": stacks.expected,
    "finding_text": preflight.text,
    "findings": findings,
    "forgotten": members.forgotten,
    "former_hosts_file": members.former_hosts_file,
    "full_address": network_facts.full_address,
    "gpu_findings": accept_gpu.gpu_findings,
    "gpu_table": accept_gpu.gpu_table,
    "health": health.health,
    "health_findings": health.findings,
    "blocking": preflight.blocking,
    "hosts_file": members.hosts_file,
    "interface_of": network_facts.interface_of,
    "known_hosts_file": members.known_hosts_file,
    "kept": stacks.read_decision,
    "kept_addresses": firewall.kept_addresses,
    "kept_file": stacks.decision_file,
    "kernel_packages": driver_result.kernel_packages,
    "linux_again": boot.linux_again,
    "locked": packages.locked,
    "looks": looks.looks,
    "machine_facts": border.machine,
    "member": members.member,
    "member_addresses": firewall.member_addresses,
    "network_plan": network.network_plan,
    "not_collected": preflight.not_collected,
    "set_aside": network_faults.set_aside,
    "offline_hosts": offline_hosts,
    "older_core": older_core,
    "other_firewall": firewall.other_firewall,
    "packages_planned": packages.packages_planned,
    "parse_files": network_facts.parse_files,
    "power_plan": driver_power.power_plan,
    "problems": preflight.problems,
    "proven": border.proven,
    "python": python_of,
    "share_disk": share.share_disk,
    "share_failure": share.share_failure,
    "share_missing": share.share_missing,
    "share_options": share.share_options,
    "share_refusal": share.share_refusal,
    "share_source": share.share_source,
    "share_unit": share.share_unit,
    "ssh_cut_off": firewall.ssh_cut_off,
    "stack": stacks.resolve,
    "toolkit_plan": toolkit.toolkit_plan,
    "unfit": looks.unfit,
    "unreachable": network_faults.unreachable,
    "wake_fault": wake.wake_fault,
    "wake_record": wake.wake_record,
    "wake_verdict": wake.wake_verdict,
    "wrong_names": members.wrong_names,
}


# What machines say among the arguments of these filters, by place: border.py's shapes, where str is
# whatever a program printed. The facts and figures of the others were checked when they came in, by
# the filters of border.py, or are looked at by themselves (health, member, the firewall's).
SHAPES = {
    "accept_allreduce": {0: [float]},
    "card_facts": {0: str},
    "connection_end": {0: str},
    "cut_off": {0: str},
    "driver_outcome": {1: str, 2: {"rc": int, "text": str}},
    "former_hosts_file": {0: str},
    "hosts_file": {0: str},
    "interface_of": {0: str},
    "known_hosts_file": {0: str},
    "linux_again": {0: str, 1: str},
    "other_firewall": {1: str, 2: str},
    "packages_planned": {0: str},
    "parse_files": {0: str},
    "power_plan": {3: str},
    "share_disk": {1: str},
    "share_failure": {1: str, 2: str},
    "share_missing": {1: str},
    "share_options": {1: border.READER},
    "share_refusal": {2: str},
    "share_unit": {0: str},
    "ssh_cut_off": {0: str, 1: str},
    "wake_fault": {0: str},
    "wake_verdict": {0: str, 1: [str]},
    "wrong_names": {0: str},
}


def _for_ansible(name, function):
    """PlanError becomes AnsibleFilterError, so that the message alone is shown."""

    @functools.wraps(function)
    def filtered(*arguments):
        checked = list(arguments)
        try:
            for place, shape in SHAPES.get(name, {}).items():
                checked[place] = border.read(checked[place], shape, name.replace("_", " "))
            return function(*checked)
        except PlanError as error:
            raise AnsibleFilterError(str(error)) from error

    return filtered


class FilterModule:
    """What Ansible asks for."""

    def filters(self):
        return {f"tandem_{name}": _for_ansible(name, of) for name, of in FILTERS.items()}
