"""Plan and check how network interfaces wake their machines. Pure functions.

Role network calls them as filters. ansible/wake.py sends the packets.
"""

import json
import re

from . import PlanError, reading

# The address of one interface; that of a group has an odd second digit.
MAC = re.compile(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


def wake_record(facts, address, port):
    """Return {"mac", "address", "port"}, which the control node needs to wake a machine.

    facts: the machine's; their "interface" has `address`, the machine's in the inventory. port: the
    port of its ssh server. Raises PlanError if the interface has no valid hardware address.
    """
    # A machine could report any network, so ansible/wake.py uses the control node's networks.
    facts = reading.as_machine_facts(facts)
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
    """Explain in a clause why an interface will not wake its machine; "" if it will.

    printed: the output of `ethtool CARD`, which only root gets in full.
    """
    # "Supports Wake-on: pumbg" and "Wake-on: g": g is the magic packet.
    supported = re.search(r"^\s*Supports Wake-on: (\w+)$", printed, re.MULTILINE)
    mode = re.search(r"^\s*Wake-on: (\w+)$", printed, re.MULTILINE)
    if supported is None or "g" not in supported[1]:
        return (
            "its network card does not report Wake on LAN: check the firmware's setup (Wake "
            "on LAN on, ErP or deep sleep off)"
        )
    if mode is None or "g" not in mode[1]:
        return "Wake on LAN could not be switched on for its network card"
    return ""


def wake_verdict(printed, service, text, record):
    """Explain in a clause why `make wake` will not wake a machine; "" if it will.

    printed: as for wake_fault; service: systemctl's answers to is-enabled and is-active of
    tandem-wake.service; text: the file with the machine's record on the control node; record: the
    record that the file should have.
    """
    fault = wake_fault(printed)
    if fault:
        return fault
    if list(service) != ["enabled", "active"]:
        states = " and ".join(word[:20] or "missing" for word in service)
        return f"tandem-wake.service, which sets the card at each boot and shutdown, is {states}"
    try:
        is_right = json.loads(text) == record
    except (ValueError, RecursionError):
        is_right = False
    return "" if is_right else ".tandem/wake on the control node has outdated data about it"
