"""Write /etc/hosts and ssh_known_hosts, with the names and keys of all members. Pure functions.

Roles call these functions as filters, with the present text of a file, and write the returned text.
The cluster's members are the machines of the inventory.
"""

import base64
import binascii
import re

from . import PlanError

HOSTS_BEGIN = "# BEGIN tandem: the members of the cluster"
HOSTS_END = "# END tandem"
# Prefixes of original lines. The line after a REPLACED line is Tandem's replacement of it.
REPLACED = "# tandem replaced: "
REMOVED = "# tandem removed: "


def hosts_file(text, members):
    """Return /etc/hosts with every member's real address.

    text: the present file. members: {name: address}.
    """
    # A loopback line loses members' names (Debian's "127.0.1.1 node1"), since Gloo would offer that
    # address to its peers. The original line stays as a comment, for `former_hosts_file`.
    lines = []
    for line in _without_block(text.splitlines()):
        # "127.0.1.1 node1.lab node1  # by the installer"
        body, hash_sign, comment = line.partition("#")
        address, *names = body.split() or [""]
        other_names = [name for name in names if name not in members]
        if not address.startswith("127.") or other_names == names:
            lines.append(line)
        elif not other_names:
            lines.append(REMOVED + line)
        else:
            new_line = f"{address}\t{' '.join(other_names)}"
            new_line += f" {hash_sign}{comment}" if hash_sign else ""
            lines += [REPLACED + line, new_line]
    block = [f"{address}\t{name}" for name, address in members.items()]
    return "\n".join([*lines, HOSTS_BEGIN, *block, HOSTS_END]) + "\n"


def former_hosts_file(text):
    """Return /etc/hosts as it was before `hosts_file`, with people's later changes."""
    former = []
    lines = iter(_without_block(text.splitlines()))
    for line in lines:
        if line.startswith(REPLACED):
            next(lines, None)  # skips Tandem's replacement
        former.append(line.removeprefix(REPLACED).removeprefix(REMOVED))
    return "".join(f"{line}\n" for line in former)


def _without_block(lines):
    """Return the lines outside of HOSTS_BEGIN and HOSTS_END."""
    outside, inside = [], False
    for line in lines:
        if line == HOSTS_BEGIN:
            inside = True
        elif line == HOSTS_END and inside:
            inside = False
        elif not inside:
            outside.append(line)
    return outside


def known_hosts_file(text, members):
    """Return ssh_known_hosts with the keys of `members`, each {"names", "keys": [{"type", "key"}]}.

    A member's new keys replace its former keys in place.
    """
    owners = {name: number for number, member in enumerate(members) for name in member["names"]}
    unplaced = dict(enumerate(members))
    lines = []
    for line in text.splitlines():
        # "node1,192.168.56.111 ssh-ed25519 AAAAC3Nz..."
        names = (line.split() or [""])[0].split(",")
        owner = next((owners[name] for name in names if name in owners), None)
        # Lines of machines that are not in `members` stay: a machine may be off or outside --limit.
        if owner is None:
            lines.append(line)
        # The new lines take the place of the member's first former line; its other lines go.
        elif owner in unplaced:
            lines += _known_hosts_lines(unplaced.pop(owner))
    for member in unplaced.values():
        lines += _known_hosts_lines(member)
    return "".join(f"{line}\n" for line in lines)


def _known_hosts_lines(member):
    return [f"{','.join(member['names'])} {key['type']} {key['key']}" for key in member["keys"]]


KEY_TYPES = {
    "ed25519": {"ssh-ed25519"},
    "ecdsa": {f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521)},
    "rsa": {"ssh-rsa"},
}


def host_keys(facts, host):
    """Return [{"type", "key"}] from facts of a connection whose host key was verified.

    Raises PlanError if a value is not a key of its kind.
    """
    # A machine reports these values, and they become lines of a file that root reads on all
    # machines. A line break, for example, would add a key for another machine.
    keys = []
    for kind, types in KEY_TYPES.items():
        if f"ssh_host_key_{kind}_public" not in facts:
            continue
        key_type = facts.get(f"ssh_host_key_{kind}_public_keytype")
        key = facts[f"ssh_host_key_{kind}_public"]
        is_of_kind = isinstance(key_type, str) and key_type in types
        if not is_of_kind or _type_inside(key) != key_type:
            raise PlanError(
                f"{host}: it reports {str(key)[:40]!r} as its {kind} host key, which is not a "
                f"key. Check /etc/ssh/ssh_host_{kind}_key.pub on that machine; until then, do "
                "not trust the machine"
            )
        keys.append({"type": key_type, "key": key})
    return keys


def _type_inside(key):
    """Return the type inside a public key (RFC 4253, 6.6); None if the text is not a key."""
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9+/]{20,2800}={0,2}", key):
        return None
    try:
        blob = base64.b64decode(key, validate=True)
    except binascii.Error:
        return None
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode("ascii", "replace")


def member(variables):
    """Return {"names", "keys"} of a machine from its host variables, for `known_hosts_file`."""
    name = variables["inventory_hostname"]
    facts = variables.get("ansible_facts")
    keys = host_keys(facts if isinstance(facts, dict) else {}, name)
    return {"names": [name, variables.get("ansible_host", name)], "keys": keys}


def forgotten(item):
    """Return a machine of {"name", "address"} without keys: `known_hosts_file` drops its lines."""
    return {"names": [item["name"], item["address"]], "keys": []}


def wrong_names(printed, members):
    """Return clauses about names that do not resolve to their members' addresses.

    printed: the output of `getent ahostsv4 NAME ...`. members: {name: address}.
    """
    # Only the first line of an address ends with the name. Connections use that address.
    addresses: dict[str, str] = {}
    for words in map(str.split, printed.splitlines()):
        if len(words) == 3:
            addresses.setdefault(words[2], words[0])
    return [
        f"{name} to {addresses.get(name, 'nothing')} instead of {address}"
        for name, address in members.items()
        if addresses.get(name) != address
    ]
