"""Choose the machine whose clock the others follow, and explain why they cannot.

Role clock calls these functions as filters.
"""

from . import firewall


def clock_server(members, setting, own_addresses):
    """Choose {"address", "host"} of the time server.

    "host" is its name in the inventory, "" for a server that is not a member. members: {name:
    address} of all machines, in the inventory's order; setting: a name, an address, or "auto";
    own_addresses: the control node's.
    """
    # `members` also has the machines that --limit excludes. So --limit does not change the server.
    if setting != "auto":
        names = {address: name for name, address in members.items()}
        address = members.get(setting, setting)
        return {"address": address, "host": names.get(address, "")}
    local = [name for name, address in members.items() if address in own_addresses]
    host = (local or list(members))[0]
    return {"address": members[host], "host": host}


def clock_servers_fault(server, facts, failed):
    """Explain in a sentence what keeps the members from following the time server; "" if nothing.

    server: its name in the inventory, "" for somebody else's server; facts: those of the server
    from preflight, or {}; failed: true if it does not answer, or failed earlier in this run.
    """
    if not server:
        return ""
    if failed:
        return f"{server}, the time server, did not answer or has failed"
    manager = firewall.firewall_manager(facts.get("ufw_conf", ""), facts.get("firewalld", False))
    # The firewall of the server is its owner's, so Tandem does not change it.
    if manager == "ufw":
        remedy = f"on {server}: sudo ufw allow from <each PC's address> to any port 123 proto udp"
        return f"ufw is active on {server}, the time server ({remedy})"
    if manager:
        remedy = f"on {server}: sudo firewall-cmd --permanent --add-service=ntp, and --reload"
        return f"{manager} is active on {server}, the time server ({remedy})"
    return ""
