"""Find the problems of machines in collected facts. Pure functions.

Role preflight and `make check` call `findings`; the checks are in faults/. A finding is {"host",
"fault", "cause", "remedy"}; "fault" is a short name that scripts may rely on, and
docs/preflight.md lists the names.
"""

from . import reading
from .faults import machine, network, stack

# With these faults site.yml does not continue with the machine.
BLOCKING = {
    *("release", "arch", "wsl", "container", "systemd", "python", "no_python", "sudo"),
    *("disk_full", "read_only", "address", "dpkg", "installer", "uv", "stack", "collect"),
    *("train_user", "duplicate_address", "duplicate_machine_id", "duplicate_mac"),
}
# These faults are only notes: they need no action, and never change the exit code of `make check`.
NOTES = {
    *("one_user", "faster_card", "xid_program", "reboot_waits", "gcc", "passphrase", "toolkit"),
    *("card_left_out", "table_old", "driver_ended", "driver_end_unknown", "python_new"),
}


def findings(facts, question):
    """Return all findings of one machine.

    facts: of module machine_facts, as reading.machine returns them. question: {"address": the
    machine's in the inventory, "listed": all addresses of the inventory, "space": [{"folder",
    "bytes"}] that must be free, "provisioned": true if the environment exists, "env_manager",
    "conda_installer", "offline", "stack" and "toolkit": the settings, "driver": the result of
    driver.driver_wanted, "table": "stacks" of stacks.yml, "kept": the earlier decision of `stack:
    auto` or {}, "ansible_core": its version, "clock": [the control node's seconds before and
    after collecting], "clock_tolerance": seconds, "users": {"provisions", "trains": names, "there":
    true if the machine has the user that trains}}.
    """
    facts = reading.as_machine_facts(facts)
    checks = (*machine.CHECKS, *network.CHECKS, *stack.CHECKS)
    return [
        dict(zip(("host", "fault", "cause", "remedy"), (facts.host, *finding)))
        for check in checks
        for finding in check(facts, question)
    ]


def not_collected(host, message):
    """Make the finding for a machine that answers, but whose facts cannot be collected."""
    return {
        "host": host,
        "fault": "collect",
        "cause": f"its facts could not be collected: {' '.join(str(message).split())}",
        "remedy": "remove the cause, then run `make check` again",
    }


def problems(rows):
    """Select the problems among findings: all but notes."""
    return [finding for finding in rows if finding["fault"] not in NOTES]


def blocking(rows):
    """Select the findings that keep site.yml from continuing with the machine."""
    return [finding for finding in rows if finding["fault"] in BLOCKING]


def text(finding):
    """Write a finding as one line for users."""
    return f"{finding['host']}: {finding['cause']}. Remedy: {finding['remedy']}"
