"""Switches machines on by the network: `make wake`. Stdlib alone, since nothing answers yet.

What it needs of each (hardware address, broadcast address) was recorded by `make provision`, where
wake_on_lan is true, in .tandem/wake/. Exit code 1: a machine did not come.
"""

import argparse
import json
import re
import socket
import sys
import time
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / ".tandem" / "wake"
PORT = 9  # discard: whoever listens there, if anybody, throws it away


class WakeError(Exception):
    """A sentence for the user."""


def packet(mac):
    """The magic packet: six bytes of ones, then the hardware address sixteen times."""
    if not re.fullmatch(r"([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}", mac):
        raise WakeError(f"{mac!r} is no hardware address: run make provision again")
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def records(folder, inventory, limit):
    """{name: record} of the inventory's machines, all or those named. Raises WakeError."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = {name: row for name, row in found.items() if Path(row["inventory"]) == inventory}
    unknown = sorted(set(limit) - set(found))
    if unknown or not found:
        raise WakeError(
            f"nothing is known of how to wake {', '.join(unknown) or 'any machine'}: set "
            "wake_on_lan: true in group_vars/all.yml and run make provision while it is on"
        )
    return {name: row for name, row in found.items() if not limit or name in limit}


def send(row, port=PORT):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet(row["mac"]), (row["broadcast"], port))


def answers(address, port=22):
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def wake(rows, seconds, pause=2.0):
    """Names of those that did not come within so many seconds; says who comes."""
    begun, absent = time.monotonic(), dict(rows)
    while absent and time.monotonic() - begun < seconds:
        for row in absent.values():  # again and again: a packet may be lost
            send(row)
        for name in [name for name, row in absent.items() if answers(row["address"])]:
            print(f"{name} answers after {time.monotonic() - begun:.0f} s", flush=True)
            del absent[name]
        time.sleep(pause if absent else 0)
    return list(absent)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Switch machines on by the network.")
    parser.add_argument("--inventory", default="inventory.ini")
    parser.add_argument("--limit", default="", help="names with commas between (default: all)")
    parser.add_argument("--seconds", type=float, default=180, help="how long to wait for them")
    args = parser.parse_args(argv)
    limit = [name for name in args.limit.split(",") if name]
    try:
        rows = records(RECORDS, Path(args.inventory).resolve(), limit)
        absent = wake(rows, args.seconds)
    except (WakeError, OSError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    if absent:
        print(
            f"tandem: {', '.join(absent)} did not answer within {args.seconds:.0f} s: is it on the "
            "same switch, and does its firmware allow Wake on LAN? Its button works always.",
            file=sys.stderr,
        )
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
