"""Images that are read from a network share: they use the same cables as the gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import formulas
from report.bottleneck import SHARE_READS
from report.figures import SHARE_READ
from report.measure import Step
from report.usage import ResourceUsage

# Bytes of an image of ImageNet, and of its copy by `make shrink SIZE=256 QUALITY=90`.
IMAGENET, SHRUNK = 110e3, 27e3
# Pixels per side; a copy of smaller images would not be smaller.
LARGE_PIXELS = 128
# A cable is full if the mean step uses this fraction of what it can carry.
FULL_CABLE = 0.7
# A setting of group_vars/all.yml.
CACHE = "share_cache_gb"


@dataclass(frozen=True)
class Reading:
    """The images that machines read from a share."""

    image_bytes: float  # of one image that is read over a cable
    # True if one of the training machines has the share; it reads its images from its disk.
    by_member: bool

    def server_bytes(self, machines: int, images: float, gradients: float) -> float:
        """Return the bytes per step on the cable of the machine that has the share. `images`: in a
        step of all machines. `gradients`: the bytes that each machine sends, and receives again."""
        machine_bytes = self.image_bytes * images / machines
        if self.by_member:
            return machine_bytes * (machines - 1) + gradients
        return machine_bytes * machines

    def cable_bytes(self, machines: int, images: float, gradients: float) -> float:
        """Return the bytes per step and direction on the fullest cable."""
        reader = self.image_bytes * images / machines + gradients if machines > 1 else 0.0
        server = self.server_bytes(machines, images, gradients)
        return server if self.by_member else max(server, reader)


def reading_of(step: Step, evidence: ResourceUsage) -> Reading | None:
    """Measure the images read from shares, by the counters of the machines. Images that a machine
    had in memory or on its disk are not counted. Returns None if hardly anything was read."""
    hosts = {rank.host for rank in step.ranks}
    rates = {use.host: use.mean(SHARE_READ) for use in evidence.shares if use.host in hosts}
    readers = {host: rate for host, rate in rates.items() if rate >= SHARE_READS}
    if not readers or step.images <= 0:
        return None
    # A machine that reads nothing from the share is the one that has it.
    images = step.images * len(readers) / len(hosts)
    image_bytes = sum(readers.values()) * step.training_seconds / images
    return Reading(image_bytes, by_member=len(readers) < len(hosts))


def without_reading(step: Step, reading: Reading) -> Step:
    """Return the step without its wait for images, if a full cable explains that wait."""
    # With another number of machines the cable would carry another number of images.
    step_bytes = reading.cable_bytes(step.nodes, step.images, gradient_bytes(step))
    rate, link_mbit = step_bytes / step.training_seconds, step.link_mbit
    is_full = link_mbit is not None and rate >= FULL_CABLE * formulas.goodput(link_mbit)
    return replace(step, data=0.0) if is_full else step


def gradient_bytes(step: Step) -> float:
    """Return the bytes per step that a machine of this run sends for gradients over a cable. An
    unknown strategy counts as 0."""
    return 0.0 if step.one_machine else step.computed_bytes or 0.0
