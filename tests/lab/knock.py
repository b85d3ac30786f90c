"""Which ports of a machine answer, seen from another machine of the lab."""

import json

# Prints the ports that answer: TCP by accepting a connection, UDP by sending something back.
PROGRAM = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def answers(port):
    kind, number = port.split()
    with socket.socket(type=socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as one:
        one.settimeout(0.5)
        try:
            one.connect((address, int(number)))
            if kind == "udp":
                one.send(b"x")
                one.recv(9)
            return True
        except OSError:
            return False

address, tcp, udp = json.loads(sys.argv[1])
ports = [f"tcp {port}" for port in tcp] + [f"udp {port}" for port in udp]
with ThreadPoolExecutor(32) as pool:
    print(json.dumps([port for port, open in zip(ports, pool.map(answers, ports)) if open]))
"""


def answering(lab, place: str, address: str, tcp: list[int], udp: list[int]) -> list[str]:
    """Those of these ports of `address` that answer when asked from `place`.

    place: "control", "stranger" or the address of a node.
    """
    wanted = json.dumps([address, tcp, udp])
    if place in ("control", "stranger"):
        done = lab("exec", "--from", place, "--", "python3", "-c", PROGRAM, wanted)
    else:
        done = lab.control("ssh", f"tandem@{place}", f"python3 -c '{PROGRAM}' '{wanted}'")
    return json.loads(done.stdout)
