"""Switch machines on over the network: `make wake`. Standard library only.

With wake_on_lan: true, `make provision` records each machine's hardware address, address and ssh
port in .tandem/wake/. This program sends Wake on LAN packets, only to networks of this machine's
interfaces, until the machines answer. Exit code 1: a machine did not answer; 2: nothing could be
tried.
"""

import argparse
import ipaddress
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from contract import interrupts
from contract.errors import UserError

RECORDS = Path(__file__).resolve().parents[1] / ".tandem" / "wake"
PORT = 9  # discard, whose service ignores what it receives. The network card reads any port.


def packet(mac):
    """Make the magic packet: six bytes of ones, then the hardware address sixteen times."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def record(path):
    """Read {"inventory", "mac", "address", "port"} from a file that `make provision` wrote.

    Raises UserError if the file is damaged.
    """
    try:
        row = json.loads(path.read_text())
        mac, port = row["mac"], row["port"]
        # A text could become a wrong packet; `type` instead of isinstance, since True is an int.
        is_valid = re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", mac) and type(port) is int
        if not is_valid or not 0 < port < 1 << 16:
            raise ValueError(f"mac is {mac!r} and port {port!r}")
        ipaddress.IPv4Address(row["address"])
        return {**row, "inventory": Path(row["inventory"])}
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{path.stem} cannot be woken, because {path} is damaged ({reason[:100]}): switch "
            "the machine on with its button, and run make provision, which writes the file "
            "again"
        ) from None


def records(folder, inventory, limit):
    """Return {name: record} of the inventory's machines, and sentences about damaged records.

    limit: names of machines; [] for all. Raises UserError if there is nothing to try.
    """
    rows, damaged = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            row = record(path)
        except UserError as error:
            damaged[path.stem] = str(error)
            continue
        if row["inventory"] == inventory:  # several inventories may share the folder
            rows[path.stem] = row
    unrecorded = sorted(set(limit) - set(rows) - set(damaged))
    if unrecorded or (not rows and not damaged):
        raise UserError(
            f"Tandem does not know how to wake {', '.join(unrecorded) or 'any machine'}: set "
            "wake_on_lan: true in group_vars/all.yml, and run make provision while the "
            "machine is on"
        )
    limited = {name: row for name, row in rows.items() if not limit or name in limit}
    return limited, [sentence for name, sentence in damaged.items() if not limit or name in limit]


def own_networks():
    """List the IPv4 networks of this machine's interfaces. Raises UserError if `ip` fails."""
    try:
        process = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, text=True)
        links = filter(None, json.loads(process.stdout))
        rows = [row for link in links for row in link["addr_info"] if row["family"] == "inet"]
        texts = [f"{row['local']}/{row['prefixlen']}" for row in rows]
        return [ipaddress.ip_interface(text).network for text in texts]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"`ip` cannot list the network cards of the control node: {error}"
        ) from None


def broadcast(address, networks):
    """Find the broadcast address of the network of `address`. Raises UserError if it is foreign."""
    reached = [network for network in networks if ipaddress.IPv4Address(address) in network]
    if not reached:
        raise UserError(
            f"no network card of the control node is in the network of {address}, and routers "
            "do not forward Wake on LAN packets: run make wake on a machine on the same "
            "switch"
        )
    # The smallest network that contains the address, as the kernel would route it.
    return str(max(reached, key=lambda network: network.prefixlen).broadcast_address)


def send(mac, to, port=PORT):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet(mac), (to, port))


def answers(address, port):
    """Return true if the ssh server of a machine accepts a connection."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def wake(rows, networks, seconds, pause=2.0):
    """Wake machines and print each that answers. Returns {name: reason} of the silent machines."""
    start, absent = time.monotonic(), dict.fromkeys(rows, "")
    while absent and time.monotonic() - start < seconds:
        for name in list(absent):
            row = rows[name]
            # Each round sends another packet, since a packet may be lost.
            try:
                send(row["mac"], broadcast(row["address"], networks))
                absent[name] = ""
            except (UserError, OSError) as error:
                absent[name] = str(error)
            if answers(row["address"], row["port"]):
                print(f"{name} answers after {time.monotonic() - start:.0f} s", flush=True)
                del absent[name]
        time.sleep(pause if absent else 0)
    return absent


def main(argv=None):
    parser = argparse.ArgumentParser(description="Switch machines on over the network.")
    parser.add_argument("--inventory", default="inventory.ini")
    parser.add_argument("--limit", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=180, help="how long to wait for them")
    args = parser.parse_args(argv)
    limit = [name for name in args.limit.split(",") if name]
    try:
        rows, damaged = records(RECORDS, Path(args.inventory).resolve(), limit)
        for sentence in damaged:
            print(f"tandem: {sentence}", file=sys.stderr)
        absent = wake(rows, own_networks(), args.seconds)
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    for name, problem in absent.items():
        reason = problem or (
            "is it on the same switch, and does its firmware allow Wake on LAN? Its button always "
            "works"
        )
        print(
            f"tandem: {name} did not answer within {args.seconds:.0f} s: {reason}.", file=sys.stderr
        )
    return 1 if absent or damaged else 0


if __name__ == "__main__":
    sys.exit(interrupts.run_main(main))
