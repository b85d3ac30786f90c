"""Find what is wrong with machines by collected facts. Pure functions.

Facts are what ansible/library/machine_facts.py returns, with the inventory name as "host". A
finding is {"host", "fault", "cause", "remedy"}; "fault" is a short name that scripts may rely on.
All but those in NOTES are problems; those in BLOCKING keep site.yml from going on with the machine.
docs/preflight.md lists them.
"""

from . import reading
from .faults import machine, network, stack

BLOCKING = {
    *("release", "arch", "wsl", "container", "systemd", "python", "no_python", "sudo"),
    *("disk_full", "read_only", "address", "dpkg", "installer", "uv", "stack", "collect"),
    *("train_user", "duplicate_address", "duplicate_machine_id", "duplicate_mac"),
}
NOTES = {
    *("one_user", "faster_card", "xid_program", "reboot_waits", "gcc", "passphrase", "toolkit"),
    *("card_left_out", "table_old", "driver_ended", "driver_end_unknown", "python_new"),
}


def findings(facts, question):
    """Find all that is wrong with one machine.

    question: {"address": the one in the inventory, "listed": all that it names, "space":
    [{"folder", "bytes"}] that must be free, "provisioned": whether the environment is in place,
    "env_manager", "conda_installer", "offline", "stack" and "toolkit": the settings, "driver":
    those of driver.driver_wanted, "table": that of stacks.yml, "kept": what `stack: auto` decided
    before or {}, "ansible_core": its version, "clock": [the control machine's seconds before and
    after collecting], "clock_tolerance": seconds, "users": {"provisions", "trains": names, "there":
    whether the machine has the latter}}.
    """
    facts = reading.known(facts)
    checks = (*machine.CHECKS, *network.CHECKS, *stack.CHECKS)
    return [
        dict(zip(("host", "fault", "cause", "remedy"), (facts.host, *finding)))
        for check in checks
        for finding in check(facts, question)
    ]


def not_collected(host, message):
    """Make the finding on a machine that answers, and whose facts cannot be collected."""
    return {
        "host": host,
        "fault": "collect",
        "cause": f"its facts could not be collected: {' '.join(str(message).split())}",
        "remedy": "see what the cause names, then run `make check` again",
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
