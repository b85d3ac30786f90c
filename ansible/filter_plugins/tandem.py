"""The filters of roles and playbooks: names for the functions of ansible/planning/.

All begin with `tandem_`, and each is used by a role or a playbook.
"""

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean

# Ansible loads this file by its path, and by no package: so here, and nowhere else, Python is told
# where planning/, contract/ and launcher/ are. At the end of the list, where they hide no module.
sys.path += map(str, Path(__file__).resolve().parents[1:3])

from msgspec import to_builtins

from boundary.facts import Printed, Reader, Smi
from contract import layout
from contract.machines import CLOCK_TOLERANCE
from planning import (
    PlanError,
    clock,
    data,
    driver,
    driver_result,
    firewall,
    looks,
    members,
    network,
    network_facts,
    offline,
    packages,
    preflight,
    reading,
    share,
    stacks,
    toolkit,
    wake,
)
from planning.faults import network as network_faults


def offline_hosts(hostvars, hosts):
    """List the hosts that have offline=true, in any of the words that Ansible takes for it."""
    return [host for host in hosts if boolean(hostvars[host].get("offline", False), strict=False)]


def findings(facts, question):
    """See planning/preflight.py; clocks may differ by as much as in a run."""
    return preflight.findings(facts, {**question, "clock_tolerance": CLOCK_TOLERANCE})


def python_of(stack, machine, manager):
    """Choose {"manager", "python"} of a machine's environment."""
    return dict(
        zip(("manager", "python"), stacks.python_for(stack, reading.known(machine), manager))
    )


def cards(facts, table):
    """See planning/stacks.py."""
    return stacks.participating_gpus(reading.known(facts), table)


def older_core(answers, core):
    """See planning/looks.py; "" if this control node has no Python for it."""
    names = ("python3.12", "python3.11", "python3.10")
    has_python = (3, 10) <= sys.version_info < (3, 13) or any(map(shutil.which, names))
    return looks.older_core(answers, core) if has_python else ""


# Filters with the names of their functions, then those with others.
FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(findings, offline_hosts, older_core),
        reading.proven,
        *(clock.clock_server, clock.clock_servers_fault),
        data.copy_failure,
        *(data.data_lack, data.data_loss),
        data.data_refusal,
        *(driver.driver_plan, driver.driver_wanted),
        *(driver_result.driver_hold, driver_result.driver_outcome, driver_result.kernel_packages),
        *(driver_result.linux_again, driver_result.power_plan),
        *(firewall.by_family, firewall.interface_networks, firewall.connection_end),
        *(firewall.container_bridges, firewall.cut_off, firewall.kept_addresses),
        *(firewall.member_addresses, firewall.other_firewall, firewall.ssh_cut_off),
        *(looks.looks, looks.unfit),
        *(members.forgotten, members.former_hosts_file, members.hosts_file),
        *(members.known_hosts_file, members.member, members.wrong_names),
        network.network_plan,
        *(network_facts.address_conflicts, network_facts.full_address),
        *(network_facts.interface_facts, network_facts.interface_of, network_facts.parse_files),
        *(network_faults.set_aside, network_faults.unreachable),
        *(offline.bundle_needed, offline.bundle_order),
        *(packages.locked, packages.packages_planned),
        *(preflight.blocking, preflight.not_collected, preflight.problems),
        *(
            share.share_cache,
            share.share_disk,
            share.share_failure,
            share.share_kind,
            share.share_loss,
        ),
        *(share.share_missing, share.share_others),
        *(share.share_options, share.share_refusal, share.share_source, share.share_unit),
        toolkit.toolkit_plan,
        *(wake.wake_fault, wake.wake_record, wake.wake_verdict),
    )
} | {
    "cards": cards,
    "cluster_findings": network_faults.cluster,
    "data_sets": layout.read_data_sets,
    "driver_facts": reading.driver,
    "driver_reboot_refused": driver_result.reboot_refused,
    "driver_upgrade": driver.upgrade_plan,
    "expected_stack": stacks.expected,
    "finding_text": preflight.text,
    "kept": stacks.read_decision,
    "kept_file": stacks.decision_file,
    "machine_facts": reading.machine,
    "python": python_of,
    "stack": stacks.resolve,
}


# The types of arguments of these filters that come from machines, by position. Other filters get
# facts that the filters of reading.py have checked, or check their arguments (member, the
# firewall's).
SHAPES = {
    "interface_facts": {0: Printed},
    "connection_end": {0: Printed},
    "data_lack": {2: Printed},
    "data_loss": {1: Printed},
    "cut_off": {0: Printed},
    "driver_outcome": {1: Printed, 2: Smi},
    "former_hosts_file": {0: Printed},
    "hosts_file": {0: Printed},
    "interface_of": {0: Printed},
    "known_hosts_file": {0: Printed},
    "linux_again": {0: Printed, 1: Printed},
    "other_firewall": {1: Printed, 2: Printed},
    "packages_planned": {0: Printed},
    "parse_files": {0: Printed},
    "power_plan": {3: Printed},
    "share_cache": {1: Printed, 2: Printed},
    "share_disk": {1: Printed},
    "share_failure": {1: Printed, 2: Printed},
    "share_missing": {1: Printed},
    "share_options": {1: Reader},
    "share_refusal": {2: Printed},
    "share_unit": {0: Printed},
    "ssh_cut_off": {0: Printed, 1: Printed},
    "wake_fault": {0: Printed},
    "wake_verdict": {0: Printed, 1: list[Printed]},
    "wrong_names": {0: Printed},
}


def _for_ansible(name, function):
    """Raise AnsibleFilterError for what is wrong with the arguments, so that only the message is
    shown."""

    @functools.wraps(function)
    def filtered(*arguments):
        checked = list(arguments)
        try:
            for place, kind in SHAPES.get(name, {}).items():
                value = reading.read(checked[place], kind, name.replace("_", " "))
                checked[place] = to_builtins(value)
            return function(*checked)
        except (PlanError, layout.LayoutError) as error:
            raise AnsibleFilterError(str(error)) from error

    return filtered


class FilterModule:
    """Filters by their names, as Ansible asks for them."""

    def filters(self):
        return {
            f"tandem_{name}": _for_ansible(name, function) for name, function in FILTERS.items()
        }
