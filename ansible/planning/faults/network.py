"""Cards, cables, names, packet filters; machines that are the same one, or do not answer."""

import ipaddress
from typing import Any

from .. import firewall, members, reading

# What ssh says, the fault's name, the remedy. The last row matches everything else.
UNREACHABLE = (
    (
        "IDENTIFICATION HAS CHANGED",
        "host_key_changed",
        "if the machine was reinstalled: ssh-keygen -R {address}, then make bootstrap; "
        "if not, somebody may be intercepting the connection: find out before you go on",
    ),
    (
        "Host key verification failed",
        "host_key_unknown",
        "make bootstrap shows its host key, to be compared with the machine's own screen",
    ),
    ("Permission denied", "login", "make bootstrap installs this control machine's key"),
    (
        "Could not resolve",
        "name",
        "write its address, as `ip -brief address` shows it there, into inventory.ini",
    ),
    (
        "Connection refused",
        "no_sshd",
        "on that machine: sudo apt install openssh-server",
    ),
    (
        "",
        "unreachable",
        "is it switched on, is its cable in, is {address} still its address? ping {address}",
    ),
)


def address(facts, question):
    if facts.interface is None:
        yield (
            "address",
            f"no network card of it has {question['address']}, its address in inventory.ini",
            "write the address that `ip -brief address` shows there, not a router's or a name",
        )
    if facts.address_owner:
        yield (
            "duplicate_address",
            f"another machine (hardware address {facts.address_owner}) also has "
            f"{question['address']}",
            "give one of the two another address: `ip -brief link` shows which machine it is",
        )


def unlisted(facts, question):
    """Addresses in the members' network that the inventory does not name: nobody lets them in."""
    link = own_link(facts)
    own = ipaddress.ip_address(question["address"]) if link else None
    for text in link.networks if link else []:
        other = ipaddress.ip_interface(text)
        if own in other.network and str(other.ip) not in question["listed"]:
            yield (
                "unlisted_address",
                f"it also has {other.ip}, which inventory.ini does not name: Linux may send from "
                "it, and the other machines do not let that in",
                f"if it stays, write other_addresses={other.ip} into its line of inventory.ini",
            )


def names(facts, question):
    if question["provisioned"] and facts.hostname in facts.loopback_names:
        yield (
            "loopback_name",
            f"/etc/hosts has its name {facts.hostname} at a loopback address again",
            "make provision; if cloud-init did it: echo 'manage_etc_hosts: false' | "
            "sudo tee /etc/cloud/cloud.cfg.d/99-hosts.cfg",
        )


def overlaps(facts, question):
    """A network of Docker, a VPN or virtual machines that overlaps the members' addresses."""
    own = ipaddress.ip_address(question["address"]) if facts.interface else None
    for link in facts.links:
        if own is None or link.name == facts.interface:
            continue
        for network in link.networks:
            if own in ipaddress.ip_interface(network).network:
                yield (
                    "overlap",
                    f"{link.name} ({network}) claims the network of {own}: packets to the "
                    "other machines may go there",
                    'give it another network (Docker: "bip" and "default-address-pools" in '
                    "/etc/docker/daemon.json), or take the interface away",
                )


def links(facts, question):
    link = own_link(facts)
    if link is None:
        return
    if link.tunnel:
        yield (
            "tunnel",
            f"the members are reached by {link.name}, a VPN's: what they exchange is encrypted, "
            "and goes at the speed of that",
            _lan_address(facts),
        )
        return  # its MTU and speed are the VPN's
    if link.wireless:
        yield ("wireless", f"{link.name} is a wireless link", "plug in a network cable")
    if link.speed is not None and 0 < link.speed < 1000:
        yield (
            "link_speed",
            f"{link.name} runs at {link.speed} Mbit/s",
            "use a cable of category 5e or better, and a gigabit port of the switch",
        )
    if link.duplex == "half":
        yield (
            "duplex",
            f"{link.name} runs at half duplex",
            "let switch and card negotiate: sudo ethtool -s " + link.name + " autoneg on",
        )
    if not _usual_mtu(link):
        yield (
            "mtu",
            f"{link.name} has an MTU of {link.mtu}",
            f"sudo ip link set {link.name} mtu 1500",
        )


def _usual_mtu(link):
    """Whether it is Ethernet's own, or one of jumbo frames."""
    return link.mtu == 1500 or link.mtu >= 9000


def _lan_address(facts):
    """The remedy for an address of a VPN's."""
    cards = [link for link in facts.links if link.physical and link.addresses]
    at = " or ".join(f"{link.addresses[0]} ({link.name})" for link in cards)
    return (
        f"write its address in the local network, {at or 'as ip -brief address shows it there'}, "
        "as ansible_host into its line of inventory.ini, on all members alike; then make bootstrap"
    )


def filters(facts, question):
    manager = firewall.firewall_manager(facts.ufw_conf, facts.firewalld)
    if manager:
        yield (
            "firewall",
            f"{manager} is switched on, and training opens ports that the kernel chooses",
            "let the other members in: sudo ufw allow from <address>, or "
            "sudo firewall-cmd --permanent --zone=trusted --add-source=<address>",
        )


CHECKS = (address, unlisted, names, overlaps, links, filters)


def own_link(facts):
    """The link that has the inventory's address; None if none does."""
    return next((link for link in facts.links if link.name == facts.interface), None)


def duplicates(machines):
    """Findings on machines two of which are the same one."""
    findings = []
    for key, of in (("machine_id", "machine id"), ("mac", "hardware address")):
        first: dict[str, str] = {}
        for facts in machines:
            value = facts.machine_id if key == "machine_id" else own_mac(facts)
            other = first.setdefault(value, facts.host)
            if value and other != facts.host:
                findings.append(
                    {
                        "host": facts.host,
                        "fault": "duplicate_" + key,
                        "cause": f"it has the same {of} as {other}: one machine under two names, "
                        "or a copied disk",
                        "remedy": "correct inventory.ini; or on a copied disk: "
                        "sudo rm /etc/machine-id && sudo systemd-machine-id-setup, and reboot",
                    }
                )
    return findings


def cluster(machines):
    """Findings that concern several machines, each of which may be in order."""
    machines = [reading.known(facts) for facts in machines]
    return duplicates(machines) + unequal_mtus(machines) + faster_interfaces(machines)


def unequal_mtus(machines):
    """The finding on the first machine whose packets may be too large for another one's card."""
    links = [(facts.host, link) for facts in machines if (link := own_link(facts))]
    if not links or any(link.tunnel for _, link in links):
        return []
    # One that is neither is a finding of its own machine.
    links = [(host, link) for host, link in links if _usual_mtu(link)] or links[:1]
    least, most = (choose(links, key=lambda row: row[1].mtu) for choose in (min, max))
    if most[1].mtu == least[1].mtu:
        return []
    return [
        {
            "host": most[0],
            "fault": "mtu_differs",
            "cause": f"its {most[1].name} has an MTU of {most[1].mtu}, and {least[0]}'s "
            f"{least[1].name} one of {least[1].mtu}: large packets may be lost between them, "
            "and connections hang",
            "remedy": f"the same on all members (and their switch): sudo ip link set "
            f"{most[1].name} mtu {least[1].mtu} there, and in its network's settings",
        }
    ]


def faster_interfaces(machines):
    """How to use a faster network than the present one, if every machine has a card in it."""
    today = [own_link(facts) for facts in machines]
    if len(machines) < 2 or not all(link and link.speed for link in today):
        return []
    slowest = min(link.speed for link in today)
    chosen = _fastest_network(machines)
    if chosen is None or chosen[0] <= slowest:
        return []
    findings = []
    for facts, link in zip(machines, today):
        name, address = chosen[2][facts.host]
        if name != link.name:
            setting = f"ansible_host={address} (and remove address=..., if it is there)"
            findings.append(
                {
                    "host": facts.host,
                    "fault": "faster_card",
                    "cause": f"all machines have a card in {chosen[1]} with {chosen[0]} Mbit/s or "
                    f"more (here {name}), while {link.name}, which training would use, is in a "
                    f"network of {slowest} Mbit/s",
                    "remedy": f"write {setting} into its line, then run make bootstrap",
                }
            )
    return findings


def _fastest_network(machines):
    """(Mbit/s of its slowest card, network, {host: (card, address)}) of the fastest common one."""
    networks: dict[Any, dict[str, Any]] = {}
    for facts in machines:
        for link in facts.links:
            for text in link.networks if link.speed else []:  # without a cable it has none
                inside = ipaddress.ip_interface(text)
                cards = networks.setdefault(inside.network, {})
                cards.setdefault(facts.host, (link.speed, link.name, str(inside.ip)))
    common = [
        (min(speed for speed, _, _ in cards.values()), network, cards)
        for network, cards in networks.items()
        if len(cards) == len(machines) and len({row[2] for row in cards.values()}) == len(cards)
    ]
    if not common:
        return None
    speed, network, cards = max(common, key=lambda row: row[0])
    return speed, str(network), {host: row[1:] for host, row in cards.items()}


def own_mac(facts):
    link = own_link(facts)
    return None if link is None else link.mac


def unreachable(variables):
    """The finding on a machine that did not answer, by what ssh said in its variables."""
    message = members.ssh_message(variables)
    name = variables["inventory_hostname"]
    at = variables.get("ansible_host", name)
    fault, remedy = next((fault, text) for words, fault, text in UNREACHABLE if words in message)
    causes = {
        "name": f"this control node cannot resolve its address in the inventory, {at}: {message}",
        "no_sshd": f"{at} has no ssh server: {message}",
        "unreachable": f"{at} did not answer: {message}",
    }
    return {
        "host": name,
        "fault": fault,
        "cause": causes.get(fault, f"{at} did not let ssh in: {message}"),
        "remedy": remedy.format(address=at),
    }


def set_aside(variables):
    """Sentences about a machine that did not answer, when the others go on without it."""
    finding = unreachable(variables)
    return f"SET ASIDE: {finding['host']}: {finding['cause']}. Remedy: {finding['remedy']}."
