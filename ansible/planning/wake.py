"""Plan and check how network interfaces wake their machines. Pure functions."""

import json
import re

from . import PlanError, reading

# The address of one interface: the lowest bit of the first byte is set in addresses of groups.
MAC = re.compile(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


def wake_record(facts, address, port):
    """Return {"mac", "address", "port"}, which the control node needs to wake a machine.

    facts: of machine_facts; their "interface" has `address`, as in the inventory. port: of the
    machine's ssh server. Raises PlanError if the interface has no valid hardware address.
    """
    # Without the network: ansible/wake.py asks the control node's interfaces for it, since a
    # machine could report any network.
    facts = reading.known(facts)
    macs = [link.mac for link in facts.links if link.name == facts.interface]
    mac = str(macs[0] if macs else None).lower()
    if not MAC.fullmatch(mac):
        raise PlanError(
            f"{facts.host}: its network card {facts.interface} reports the hardware address "
            f"{mac[:40]!r}, so make wake cannot wake it: set wake_on_lan=false in its line in "
            "the inventory"
        )
    return {"mac": mac, "address": address, "port": int(port)}


def wake_fault(printed):
    """Return why an interface will not wake its machine, as half a sentence; "" if it will.

    printed: the output of `ethtool CARD` as root, since it hides waking from others.
    """
    able = re.search(r"^\s*Supports Wake-on: (\w+)$", printed, re.MULTILINE)
    mode = re.search(r"^\s*Wake-on: (\w+)$", printed, re.MULTILINE)
    if able is None or "g" not in able[1]:
        return (
            "its network card does not report Wake on LAN: check the firmware's setup (Wake "
            "on LAN on, ErP or deep sleep off)"
        )
    return (
        ""
        if mode and "g" in mode[1]
        else ("Wake on LAN could not be switched on for its network card")
    )


def wake_verdict(printed, service, text, record):
    """Return why `make wake` will not wake a machine, as half a sentence; "" if it will.

    printed: as for wake_fault; service: systemctl's answers to is-enabled and is-active of
    tandem-wake.service; text: the machine's record on the control node, which should be
    `record`.
    """
    fault = wake_fault(printed)
    if fault:
        return fault
    if list(service) != ["enabled", "active"]:
        states = " and ".join(word[:20] or "not there" for word in service)
        return f"tandem-wake.service, which sets the card at each start and end, is {states}"
    try:
        is_right = json.loads(text) == record
    except (ValueError, RecursionError):
        is_right = False
    return "" if is_right else ".tandem/wake on the control node has outdated data about it"
