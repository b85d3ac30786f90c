"""The protocol from the guard: the same frames, however the bytes were split."""

import json

import pytest

from launcher.watch.guards import Frames

HELLO = b'{"type": "hello", "seq": 0, "protocol": 2, "way": "service"}\n'
LOG = json.dumps({"type": "log", "rank": 0, "stream": "stdout", "bytes": 12}).encode() + b"\n"
PAYLOAD = b'{"a": 1}\nxy\n'
BEAT = b'{"type": "beat", "unix": 1.5, "running": [0]}\n'
WIRE = b"welcome to node1\n" + HELLO + LOG + PAYLOAD + BEAT


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_frames_do_not_depend_on_the_pieces(size):
    frames = Frames((0,))
    found = []
    for start in range(0, len(WIRE), size):
        found += frames.feed(WIRE[start : start + size])
    assert [(frame["type"], data) for frame, data in found] == [
        ("hello", b""),
        ("log", PAYLOAD),
        ("beat", b""),
    ]
    assert frames.rest() == "welcome to node1"


def test_what_came_instead_of_a_guard_is_kept():
    frames = Frames((0,))
    assert list(frames.feed(b"bash: /usr/bin/python3: No such file")) == []
    assert "No such file" in frames.rest()
