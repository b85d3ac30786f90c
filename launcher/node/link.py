"""The control side as the guard sees it: its orders, the lease they renew, the frames it gets."""

import select

from launcher.node.frames import FrameWriter, LineReader
from launcher.node.machine import boottime
from launcher.node.task import DEFAULTS

PATIENCE = 1.0  # seconds between two looks at a reader that takes nothing


class Link:
    """Both directions of the connection, and how long its silence may last."""

    def __init__(self, stdin, stdout):
        self.frames, self.orders = FrameWriter(stdout), LineReader(stdin)
        self.lease = DEFAULTS["lease"]
        self.renewed = boottime()

    def left(self):
        """Seconds until the lease ends; below 0 when it has ended."""
        return self.renewed + self.lease - boottime()

    def read(self):
        """The orders that have arrived. Each of them renews the lease."""
        orders = self.orders.lines()
        if orders:
            self.renewed = boottime()
        return orders

    @property
    def lost(self):
        """Whether the connection has ended."""
        return self.orders.ended or self.frames.broken

    def deliverable(self):
        """Whether there are frames left, and a reader to wait for."""
        return bool(self.frames.pending) and self.left() >= 0 and not self.orders.ended

    def wait_for_reader(self):
        """Give a slow reader time to take some more."""
        select.select([], [self.frames.fd], [], PATIENCE)
        self.read()
        self.frames.flush()

    def drain(self):
        """Deliver the last frames as long as the control side shows that it lives."""
        while self.deliverable():
            self.wait_for_reader()
