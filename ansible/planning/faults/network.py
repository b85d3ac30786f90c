"""Check interfaces, cables, names, packet filters; find duplicate and silent machines.

Each check of the CHECKS yields (fault, cause, remedy) for one machine; preflight.findings calls
them and describes `question`. facts: MachineFacts (boundary/facts.py). `check_cluster` compares the
machines with each other. `explain_unreachable` explains a machine that did not answer. Roles call
both as filters.
"""

import ipaddress
from typing import Any

from .. import firewall, reading

# (words of ssh's message, name of the fault, remedy): the first match counts, and "" matches every
# message. A changed host key comes first, since its message also says that verification failed.
SSH_FAULTS = (
    (
        "IDENTIFICATION HAS CHANGED",
        "host_key_changed",
        "if the machine was reinstalled, type ssh-keygen -R {address}, then make bootstrap; "
        "otherwise somebody may intercept the connection: find out before you continue",
    ),
    (
        "Host key verification failed",
        "host_key_unknown",
        "make bootstrap shows its host key; compare the key with the machine's own screen",
    ),
    ("Permission denied", "login", "make bootstrap installs the control node's key"),
    (
        "Could not resolve",
        "name",
        "write the address that `ip -brief address` shows on it into inventory.ini",
    ),
    ("Connection refused", "no_sshd", "type on that machine: sudo apt install openssh-server"),
    (
        "",
        "unreachable",
        "is it switched on, is its cable in, is {address} still its address? ping {address}",
    ),
)


def check_address(facts, question):
    # Ansible reached the machine there. So a router forwards the address, or it is a name.
    if facts.interface is None:
        yield (
            "address",
            f"none of its network cards has {question['address']}, its address in inventory.ini",
            "write the address that `ip -brief address` shows on it, not a router's or a name",
        )
    if facts.address_owner:
        yield (
            "duplicate_address",
            f"another machine (hardware address {facts.address_owner}) also has "
            f"{question['address']}",
            "give one of the two another address: `ip -brief link` shows which machine it is",
        )


def check_unlisted_addresses(facts, question):
    """Find addresses in the members' network that are missing in the inventory."""
    # The firewalls of the members drop packets that come from such an address.
    link = find_cluster_link(facts)
    if link is None:
        return
    cluster_address = ipaddress.ip_address(question["address"])
    for text in link.networks:
        address = ipaddress.ip_interface(text)
        if cluster_address in address.network and str(address.ip) not in question["listed"]:
            yield (
                "unlisted_address",
                f"it also has the address {address.ip}, which inventory.ini does not list: "
                "the other machines' firewalls drop packets that come from this address",
                f"if the address stays, write other_addresses={address.ip} into its line of "
                "inventory.ini",
            )


def check_names(facts, question):
    # Installers write such a line. Provisioning removes it, so only its return is a finding.
    if question["provisioned"] and facts.hostname in facts.loopback_names:
        yield (
            "loopback_name",
            f"/etc/hosts maps its name {facts.hostname} to a loopback address again",
            "make provision; if cloud-init did it: echo 'manage_etc_hosts: false' | "
            "sudo tee /etc/cloud/cloud.cfg.d/99-hosts.cfg",
        )


def check_overlaps(facts, question):
    """Find a network of Docker, a VPN or virtual machines that overlaps the members' addresses."""
    if not facts.interface:
        return
    cluster_address = ipaddress.ip_address(question["address"])
    for link in facts.links:
        if link.name == facts.interface:
            continue
        for network in link.networks:
            if cluster_address in ipaddress.ip_interface(network).network:
                yield (
                    "overlap",
                    f"{link.name} ({network}) overlaps with the network of {cluster_address}: "
                    f"packets to the other machines may take {link.name}",
                    'change the network of that interface (for Docker, "bip" and '
                    '"default-address-pools" in /etc/docker/daemon.json), or remove the '
                    "interface",
                )


def check_link(facts, question):
    link = find_cluster_link(facts)
    if link is None:
        return
    if link.tunnel:
        local = " or ".join(
            f"{interface.addresses[0]} ({interface.name})"
            for interface in facts.links
            if interface.physical and interface.addresses
        )
        yield (
            "tunnel",
            f"it reaches the other PCs through {link.name}, a VPN: training traffic is "
            "encrypted, and only as fast as the VPN",
            "in inventory.ini, set ansible_host of every PC to its address in the local network, "
            "which "
            f"{f'is {local} on this PC' if local else '`ip -brief address` shows on that PC'}; "
            "then type `make bootstrap`",
        )
        return  # MTU and speed below would be those of the VPN
    if link.wireless:
        yield ("wireless", f"{link.name} is a wireless link", "plug in a network cable")
    # A link without a cable may report a speed of 0.
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
            "let the switch and the network card negotiate: sudo ethtool "
            "-s " + link.name + " autoneg on",
        )
    if not _has_usual_mtu(link):
        cause = f"{link.name} has an MTU of {link.mtu}"
        yield "mtu", cause, f"sudo ip link set {link.name} mtu 1500"


def _has_usual_mtu(link):
    """Return true for Ethernet's MTU of 1500 bytes, and for jumbo frames, which have 9000."""
    return link.mtu == 1500 or link.mtu >= 9000


def check_firewall(facts, question):
    manager = firewall.firewall_manager(facts.ufw_conf, facts.firewalld)
    if manager:  # "ufw" or "firewalld"
        yield (
            "firewall",
            f"{manager} is active, but training uses ports that the kernel chooses",
            "let the other PCs in: sudo ufw allow from <address>, or sudo firewall-cmd "
            "--permanent --zone=trusted --add-source=<address>",
        )


CHECKS = (
    *(check_address, check_unlisted_addresses, check_names),
    *(check_overlaps, check_link, check_firewall),
)


def find_cluster_link(facts):
    """Find the link that has the inventory's address, over which ranks exchange data, or None."""
    return next((link for link in facts.links if link.name == facts.interface), None)


def find_duplicates(machines):
    """Find machines that are one machine under two names, or that have a copied disk."""
    findings = []
    for key, label in (("machine_id", "machine id"), ("mac", "hardware address")):
        owners: dict[str, str] = {}
        for facts in machines:
            link = find_cluster_link(facts)
            value = facts.machine_id if key == "machine_id" else link and link.mac
            # Only each later machine with the same value gets a finding. A machine without a
            # value (None or "") shares nothing with others.
            owner = owners.setdefault(value, facts.host)
            if value and owner != facts.host:
                findings.append(
                    {
                        "host": facts.host,
                        "fault": "duplicate_" + key,
                        "cause": f"it has the same {label} as {owner}: one machine under two "
                        "names, or a copied disk",
                        "remedy": "correct inventory.ini; or on a copied disk: "
                        "sudo rm /etc/machine-id && sudo systemd-machine-id-setup, and reboot",
                    }
                )
    return findings


def check_cluster(machines):
    """List the findings about machines that may each be in order, but do not fit each other.

    A finding is {"host", "fault", "cause", "remedy"}.
    """
    machines = [reading.as_machine_facts(facts) for facts in machines]
    checks = (find_duplicates, find_unequal_mtus, propose_faster_interfaces)
    return [finding for check in checks for finding in check(machines)]


def find_unequal_mtus(machines):
    """Find a machine whose packets may be too large for another machine's interface."""
    links = [(facts.host, link) for facts in machines if (link := find_cluster_link(facts))]
    # Tunnels have smaller MTUs, and check_link has reported them.
    if not links or any(link.tunnel for _, link in links):
        return []
    # check_link has reported unusual MTUs too, so only usual MTUs are compared.
    links = [(host, link) for host, link in links if _has_usual_mtu(link)]
    if not links:
        return []
    low_host, low = min(links, key=lambda pair: pair[1].mtu)
    high_host, high = max(links, key=lambda pair: pair[1].mtu)
    if high.mtu == low.mtu:
        return []
    return [
        {
            "host": high_host,
            "fault": "mtu_differs",
            "cause": f"its {high.name} has an MTU of {high.mtu}, but {low_host}'s {low.name} has "
            f"an MTU of {low.mtu}: large packets between them may be lost, and "
            "connections then hang",
            "remedy": "use the same MTU on all PCs (and their switch): sudo ip link set "
            f"{high.name} mtu {low.mtu} on that machine, and in its network settings",
        }
    ]


def propose_faster_interfaces(machines):
    """Propose a faster network than the present one, if every machine has an interface in it."""
    cluster_links = [find_cluster_link(facts) for facts in machines]
    if len(machines) < 2 or not all(link and link.speed for link in cluster_links):
        return []
    # {network: {host: (its interface, its address)}}
    networks: dict[Any, dict[str, Any]] = {}
    for facts in machines:
        for link in facts.links:
            for text in link.networks if link.speed else []:  # no speed: no cable
                address = ipaddress.ip_interface(text)
                networks.setdefault(address.network, {}).setdefault(facts.host, (link, address.ip))
    # The speed of a network that connects all machines is that of its slowest interface, in Mbit/s.
    # Docker gives each machine the same network and address. Such a network connects nobody.
    speeds = {
        network: min(link.speed for link, _ in interfaces.values())
        for network, interfaces in networks.items()
        if len(interfaces) == len({address for _, address in interfaces.values()}) == len(machines)
    }
    present_speed = min(link.speed for link in cluster_links)
    if not speeds or max(speeds.values()) <= present_speed:
        return []
    network = max(speeds, key=lambda network: speeds[network])
    findings = []
    for facts, cluster_link in zip(machines, cluster_links):
        link, address = networks[network][facts.host]
        if link.name != cluster_link.name:
            setting = f"ansible_host={address} (and remove address=..., if it is there)"
            findings.append(
                {
                    "host": facts.host,
                    "fault": "faster_card",
                    "cause": f"all machines have a network card in {network} with "
                    f"{speeds[network]} Mbit/s or more (this one {link.name}), but training would "
                    f"use {cluster_link.name}, in a network of {present_speed} Mbit/s",
                    "remedy": f"write {setting} into its line, then run make bootstrap",
                }
            )
    return findings


def explain_unreachable(variables):
    """Explain why a machine did not answer, as a finding.

    variables: the machine's in Ansible, with ssh's message, which role reach registered.
    """
    message = " ".join(str(variables.get("reach_answer", {}).get("msg", "nothing")).split())
    # Ansible adds its own words before the message of ssh.
    for prefix in ("Task failed: ", "Failed to connect to the host via ssh: "):
        message = message.removeprefix(prefix)
    name = variables["inventory_hostname"]
    address = variables.get("ansible_host", name)
    fault, remedy = next((fault, text) for words, fault, text in SSH_FAULTS if words in message)
    # Every other fault means that ssh could not log in.
    causes = {
        "name": f"this control node cannot resolve its address in the inventory, {address}: "
        f"{message}",
        "no_sshd": f"{address} has no ssh server: {message}",
        "unreachable": f"{address} did not answer: {message}",
    }
    return {
        "host": name,
        "fault": fault,
        "cause": causes.get(fault, f"ssh could not log in to {address}: {message}"),
        "remedy": remedy.format(address=address),
    }


def describe_skipped(variables):
    """Describe in a line for users a machine that did not answer, which the play skips."""
    finding = explain_unreachable(variables)
    return (
        f"SKIPPED: {finding['host']}: {finding['cause'].rstrip('.')}. Remedy: {finding['remedy']}."
    )
