"""Who gives the others the time."""

import pytest

from planning import clock

MEMBERS = {"pc1": "10.0.0.1", "pc2": "10.0.0.2"}


@pytest.mark.parametrize(
    ("wanted", "own_addresses", "address", "host"),
    [
        ("auto", ["127.0.0.1", "10.0.0.9"], "10.0.0.1", "pc1"),
        ("auto", ["127.0.0.1", "10.0.0.2"], "10.0.0.2", "pc2"),  # the control machine is a member
        ("pc2", [], "10.0.0.2", "pc2"),
        ("10.0.0.2", [], "10.0.0.2", "pc2"),
        ("10.0.0.254", [], "10.0.0.254", ""),  # a router that serves time
    ],
)
def test_the_server(wanted, own_addresses, address, host):
    assert clock.clock_server(MEMBERS, wanted, own_addresses) == {"address": address, "host": host}
