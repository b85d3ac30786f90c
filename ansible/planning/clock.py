"""Choose the machine whose clock the others follow, and explain why they cannot."""

from . import firewall


def clock_server(members, setting, own_addresses):
    """Choose {"address", "host"} of the server; "host": its name in the inventory, "" for another.

    members: {name: address} of all machines, in the inventory's order: `--limit` must not change
    the answer. setting: a name, an address, or "auto", which means the control node if it is a
    member, else the first member. own_addresses: the control node's.
    """
    if setting != "auto":
        names = {address: name for name, address in members.items()}
        return {
            "address": members.get(setting, setting),
            "host": names.get(members.get(setting, setting), ""),
        }
    local = [name for name, address in members.items() if address in own_addresses]
    host = (local or list(members))[0]
    return {"address": members[host], "host": host}


def clock_servers_fault(server, facts, failed):
    """Explain in a sentence what keeps the others from following the clock; "" if nothing.

    server: its name in the inventory, "" for somebody else's server; facts: what preflight
    collected there, or {}; failed: true if it does not answer, or failed earlier in this run.
    """
    if not server:
        return ""
    if failed:
        return f"{server}, the time server, did not answer or has failed"
    manager = firewall.firewall_manager(facts.get("ufw_conf", ""), facts.get("firewalld", False))
    # Its firewall is the owner's, so Tandem does not change it.
    if manager == "ufw":
        remedy = f"on {server}: sudo ufw allow from <address of each> to any port 123 proto udp"
        return f"ufw is active on {server}, the time server ({remedy})"
    if manager:
        remedy = f"on {server}: sudo firewall-cmd --permanent --add-service=ntp, and --reload"
        return f"{manager} is active on {server}, the time server ({remedy})"
    return ""
