"""The formulas behind every prediction, with their sources; docs/report.md explains them.

Units: bytes, seconds, bytes per second; `world` is the number of ranks.
"""

from __future__ import annotations

# Ethernet at MTU 1500 carries 1448 bytes of TCP payload in 1538 bytes on the wire.
PAYLOAD_SHARE = 1448 / 1538
# DistributedDataParallel's default bucket_cap_mb.
BUCKET_BYTES = 25 * 2**20
# What the trainer's --sync takes, and which of them send half the bytes.
SYNCS = ("allreduce", "bf16", "fp16")
HALVED = ("bf16", "fp16")


def ring_bytes(world: int, payload: float) -> float:
    """Bytes that each node sends in a ring all-reduce of `payload` bytes: 2 (N-1)/N x payload.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009. Measured: 153.7 MB for ResNet-50 in fp32 over 4 nodes, where this says
    153.3.
    """
    return 2 * (world - 1) / world * payload


def line_rate(mbit: float) -> float:
    """Bytes per second that a link of `mbit` Mbit/s carries, headers included."""
    return mbit * 1e6 / 8


def goodput(mbit: float) -> float:
    """Bytes per second of payload that TCP gets through a link of `mbit` Mbit/s at MTU 1500."""
    return line_rate(mbit) * PAYLOAD_SHARE


def exposed(transfer: float, backward: float, payload: float) -> float:
    """Seconds of an all-reduce that backward does not hide.

    DistributedDataParallel sends bucket after bucket while backward makes the next ones, so at most
    `backward` is hidden; the last bucket leaves when backward has ended, so its share is never
    hidden.
    """
    return max(transfer - backward, transfer * last_bucket(payload))


def transfer_of(waited: float, backward: float, payload: float) -> float:
    """Seconds of transfer that leave `waited` seconds exposed: the inverse of `exposed`."""
    return min(waited + backward, waited / last_bucket(payload))


def last_bucket(payload: float) -> float:
    """The share of the gradients that is in the last bucket."""
    return min(1.0, BUCKET_BYTES / payload) if payload > 0 else 1.0


def bytes_per_step(sync: str, world: int, gradient_bytes: float) -> float:
    """Bytes that each node sends per step; fp16 and bf16 halve each gradient."""
    return ring_bytes(world, gradient_bytes / 2 if sync in HALVED else gradient_bytes)


def sync_wait(sync: str, world: int, gradient_bytes: float, rate: float, backward: float) -> float:
    """Seconds per step that a rank waits when `rate` bytes per second get through."""
    if world == 1:
        return 0.0
    return exposed(bytes_per_step(sync, world, gradient_bytes) / rate, backward, gradient_bytes)


def faster_loading(step: float, data_wait: float, factor: float) -> float:
    """Seconds per step when the loader becomes `factor` times faster.

    A loader that is waited for works all the time, so it takes `step` now; afterwards the slower of
    loader and rest rules.
    """
    return max(step - data_wait, step / factor)
