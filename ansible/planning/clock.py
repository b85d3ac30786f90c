"""Which machine gives the others the time, and what is wrong there if they do not follow it."""

from . import firewall


def clock_server(members, wanted, own_addresses):
    """{"address", "host"} of the server; "host" is its name in the inventory, "" for another one.

    members: {name: address} of all machines, in the inventory's order: what `--limit` leaves out
    must not change the answer. wanted: a name, an address, or "auto", which means the control
    machine if it is a member, else the first member. own_addresses: the control machine's.
    """
    if wanted != "auto":
        names = {address: name for name, address in members.items()}
        return {
            "address": members.get(wanted, wanted),
            "host": names.get(members.get(wanted, wanted), ""),
        }
    here = [name for name, address in members.items() if address in own_addresses]
    host = (here or list(members))[0]
    return {"address": members[host], "host": host}


def clock_servers_fault(server, facts, failed):
    """A sentence about what keeps the others from following the cluster's clock; "" if nothing.

    server: its name in the inventory, "" for somebody else's server; facts: what preflight
    collected there, or {}; gone: whether it does not answer, or failed earlier in this run.
    """
    if not server:
        return ""
    if failed:
        return f"{server}, which gives the time, did not answer or has failed"
    manager = firewall.firewall_manager(facts.get("ufw_conf", ""), facts.get("firewalld", False))
    if manager == "ufw":
        remedy = f"on {server}: sudo ufw allow from <address of each> to any port 123 proto udp"
        return f"ufw is switched on at {server}, which gives the time ({remedy})"
    if manager:
        remedy = f"on {server}: sudo firewall-cmd --permanent --add-service=ntp, and --reload"
        return f"{manager} is switched on at {server}, which gives the time ({remedy})"
    return ""
