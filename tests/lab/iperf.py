"""A peer for our own measurements of the lab's cables."""

import json
import subprocess


def iperf3(lab):
    """Mbit/s from node1 to node2."""
    first, second = (["ip", "netns", "exec", f"{lab.name}-node{n}", "iperf3"] for n in (1, 2))
    serve = [*second, "--server", "--one-off", "--forceflush"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    while "listening" not in server.stdout.readline():
        assert server.poll() is None
    client = [*first, "--client", "192.168.56.112", "--time", "3", "--omit", "1", "--json"]
    printed = json.loads(subprocess.run(client, capture_output=True, check=True).stdout)
    server.communicate(timeout=30)
    return printed["end"]["sum_received"]["bits_per_second"] / 1e6
