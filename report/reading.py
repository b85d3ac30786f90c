"""Images of a share, which come through the cables that gradients go through, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import formulas
from report.bottleneck import SHARE_READS
from report.figures import SHARE_READ
from report.measure import Step
from report.usage import ResourceUsage

# Bytes of an image of ImageNet's, and of its copy by `make shrink SIZE=256 QUALITY=90`.
IMAGENET, SHRUNK = 110e3, 27e3
# Of smaller images such a copy is no smaller.
LARGE_PIXELS = 128
# Of what a link carries, in the mean of a step.
FULL_CABLE = 0.7
# A setting of group_vars/all.yml.
CACHE = "share_cache_gb"


@dataclass(frozen=True)
class Reading:
    """`image_bytes`: of one image that is read over a cable. `by_member`: whether one of the
    machines that train shares the images; it reads its own ones from its disk."""

    image_bytes: float
    by_member: bool

    def server_bytes(self, machines: int, images: float, gradients: float) -> float:
        """What the cable of the machine with the share carries in a step of so many images.
        `gradients`: bytes that each machine sends for them, which are as many as it receives."""
        part = self.image_bytes * images / machines
        return part * (machines - 1) + gradients if self.by_member else part * machines

    def cable_bytes(self, machines: int, images: float, gradients: float) -> float:
        """What the fullest cable carries, in one way."""
        reader = self.image_bytes * images / machines + gradients if machines > 1 else 0.0
        server = self.server_bytes(machines, images, gradients)
        return server if self.by_member else max(server, reader)


def reading_of(step: Step, evidence: ResourceUsage) -> Reading | None:
    """What a run read from shares, by its machines' counters: what their memory or their disks kept
    is not in it. None where that was next to nothing."""
    hosts = {rank.host for rank in step.ranks}
    read = {use.host: use.mean(SHARE_READ) for use in evidence.shares if use.host in hosts}
    readers = {host: rate for host, rate in read.items() if rate >= SHARE_READS}
    if not readers or step.images <= 0:
        return None
    images = step.images * len(readers) / len(hosts)
    return Reading(sum(readers.values()) * step.training / images, len(readers) < len(hosts))


def without_reading(step: Step, reading: Reading) -> Step:
    """The step without its wait for images, where a full cable explains it: with another number of
    machines the cable carries another number of images."""
    moved = reading.cable_bytes(step.nodes, step.images, gradient_bytes(step)) / step.training
    full = step.link_mbit is not None and moved >= FULL_CABLE * formulas.goodput(step.link_mbit)
    return replace(step, data=0.0) if full else step


def gradient_bytes(step: Step) -> float:
    """Bytes that a machine of this run sends for the gradients of a step."""
    if step.strategy is None or step.one_machine:
        return 0.0
    return step.strategy.bytes_per_step(step.nodes, step.payload, step.gpus)
