"""Waking machines by their network cards: what is recorded, and what hinders it. Pure functions."""

import ipaddress
import re


def wake_record(facts, address):
    """{"mac", "broadcast", "address"}: what the control machine needs while a machine is off.

    facts: those of machine_facts, whose "interface" holds `address`, the one in the inventory.
    """
    link = next(link for link in facts["links"] if link["name"] == facts["interface"])
    own = next(text for text in link["networks"] if text.split("/")[0] == address)
    broadcast = ipaddress.ip_interface(own).network.broadcast_address
    return {"mac": link["mac"], "broadcast": str(broadcast), "address": address}


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
