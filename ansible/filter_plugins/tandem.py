"""The filters of roles and playbooks: names for the functions of ansible/planning/.

All names begin with `tandem_`, and a role or a playbook uses each filter. This file decides
nothing: it only checks the arguments that come from machines, and translates errors for Ansible.
"""

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean

# Ansible loads this file by its path, not as a part of a package. So the folders of planning/ and
# contract/ are added to Python's path here, at its end, where they hide no module of Ansible.
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
    """List the hosts that have offline=true, or another word that Ansible reads as true."""
    return [host for host in hosts if boolean(hostvars[host].get("offline", False), strict=False)]


def findings(facts, question):
    """See planning/preflight.py. Clocks may differ by as much as the launcher accepts."""
    return preflight.findings(facts, {**question, "clock_tolerance": CLOCK_TOLERANCE})


def choose_python(stack, facts, manager):
    """Choose {"manager", "python"} of a machine's environment: see stacks.choose_environment."""
    manager, python = stacks.choose_environment(stack, reading.as_machine_facts(facts), manager)
    return {"manager": manager, "python": python}


def cards(facts, table):
    """See planning/stacks.py."""
    return stacks.participating_gpus(reading.as_machine_facts(facts), table)


def older_core(answers, core):
    """See planning/looks.py. Returns "" if the control node has no Python for that ansible-core."""
    names = ("python3.12", "python3.11", "python3.10")
    has_python = (3, 10) <= sys.version_info < (3, 13) or any(map(shutil.which, names))
    return looks.older_core(answers, core) if has_python else ""


# The first filters have the names of their functions, and the remaining filters other names.
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
        *(firewall.split_by_family, firewall.interface_networks, firewall.read_ssh_connection),
        *(firewall.container_bridges, firewall.find_cut_off_listeners, firewall.kept_addresses),
        *(firewall.member_addresses, firewall.other_firewall, firewall.find_cut_off_peers),
        *(looks.looks, looks.unfit),
        *(members.forgotten, members.former_hosts_file, members.hosts_file),
        *(members.known_hosts_file, members.member, members.wrong_names),
        network.network_plan,
        *(network_facts.address_conflicts, network_facts.full_address),
        *(network_facts.interface_facts, network_facts.interface_of, network_facts.parse_files),
        *(network_faults.describe_skipped, network_faults.explain_unreachable),
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
    "cluster_findings": network_faults.check_cluster,
    "data_sets": layout.read_data_sets,
    "driver_facts": reading.driver,
    "driver_reboot_refused": driver_result.reboot_refused,
    "driver_upgrade": driver.upgrade_plan,
    "expected_stack": stacks.predict_stack,
    "finding_text": preflight.text,
    "kept": stacks.read_decision,
    "kept_file": stacks.decision_file,
    "machine_facts": reading.machine,
    "python": choose_python,
    "stack": stacks.resolve,
}


# The types of the arguments that come from machines, by filter and position. Arguments of other
# filters were checked by reading.py before, or by the filters themselves (member, the firewall's).
SHAPES = {
    "interface_facts": {0: Printed},
    "read_ssh_connection": {0: Printed},
    "data_lack": {2: Printed},
    "data_loss": {1: Printed},
    "find_cut_off_listeners": {0: Printed},
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
    "find_cut_off_peers": {0: Printed, 1: Printed},
    "wake_fault": {0: Printed},
    "wake_verdict": {0: Printed, 1: list[Printed]},
    "wrong_names": {0: Printed},
}


def _for_ansible(name, function):
    """Return a filter that checks its arguments, and then calls `function`."""

    @functools.wraps(function)
    def filtered(*arguments):
        checked = list(arguments)
        try:
            for position, kind in SHAPES.get(name, {}).items():
                value = reading.read(checked[position], kind, name.replace("_", " "))
                checked[position] = to_builtins(value)
            return function(*checked)
        except (PlanError, layout.LayoutError) as error:
            # Ansible prints only the message of this error, without a traceback.
            raise AnsibleFilterError(str(error)) from error

    return filtered


class FilterModule:
    """Filters by their names, as Ansible asks for them."""

    def filters(self):
        return {
            f"tandem_{name}": _for_ansible(name, function) for name, function in FILTERS.items()
        }
