"""Which machine gives the others the time: a pure function of the inventory."""


def clock_server(members, wanted, own_addresses):
    """{"address", "host"} of the server; "host" is its name in the inventory, "" for another one.

    members: {name: address} in the inventory's order, all of them: what `--limit` leaves out must
    not change the answer. wanted: a name, an address, or "auto", which is the control machine if it
    is a member, else the first member. own_addresses: those of the control machine.
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
