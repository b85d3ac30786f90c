"""Waking machines by their network cards: what is recorded, and what hinders it. Pure functions."""

import json
import re

from . import PlanError, reading

# A card's own address: the lowest bit of the first byte is set in those of groups.
MAC = re.compile(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


def wake_record(facts, address, port):
    """{"mac", "address", "port"}: what the control machine needs while a machine is off.

    facts: those of machine_facts, whose "interface" holds `address`, the one in the inventory.
    port: that of its ssh server. Raises PlanError where its card says no address of its own.

    To which network the packet goes is not recorded: ansible/wake.py asks the cards of the control
    machine, since a machine may say what it likes of its own.
    """
    facts = reading.known(facts)
    macs = [link.mac for link in facts.links if link.name == facts.interface]
    mac = str(macs[0] if macs else None).lower()
    if not MAC.fullmatch(mac):
        raise PlanError(
            f"{facts.host}: its card {facts.interface} says {mac[:40]!r} of its hardware "
            "address, so make wake cannot call it: set wake_on_lan=false in its line of the "
            "inventory"
        )
    return {"mac": mac, "address": address, "port": int(port)}


def wake_fault(printed):
    """Half a sentence on why a card will not wake its machine; "" where it will.

    printed: what `ethtool CARD` says; only root is told of waking.
    """
    able = re.search(r"^\s*Supports Wake-on: (\w+)$", printed, re.MULTILINE)
    mode = re.search(r"^\s*Wake-on: (\w+)$", printed, re.MULTILINE)
    if able is None or "g" not in able[1]:
        return (
            "its card does not say that it wakes by a magic packet: see the firmware's setup "
            "(Wake on LAN on, ErP or deep sleep off)"
        )
    return "" if mode and "g" in mode[1] else "its card was not set to wake it"


def wake_verdict(printed, service, text, record):
    """Half a sentence on why `make wake` will not wake a machine; "" where it will.

    printed: as wake_fault takes it; service: what systemctl answers to is-enabled and is-active of
    tandem-wake.service; text: its record on the control machine, which should say `record`.
    """
    fault = wake_fault(printed)
    if fault:
        return fault
    if list(service) != ["enabled", "active"]:
        states = " and ".join(word[:20] or "not there" for word in service)
        return f"tandem-wake.service, which sets the card at each start and end, is {states}"
    try:
        right = json.loads(text) == record
    except (ValueError, RecursionError):
        right = False
    return "" if right else "what .tandem/wake on the control machine says of it is wrong"
