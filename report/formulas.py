"""The formulas behind every prediction, with their sources; bench/verdict/README.md explains them.

Units: bytes, seconds, bytes per second; `gpus` is the number of ranks on each machine.
"""

from __future__ import annotations

from typing import Any

from boundary.run_files import RankStart
from contract.strategies import MIB, Payload, Strategy, known

# Ethernet at MTU 1500 carries 1448 bytes of TCP payload in 1538 bytes on the wire.
PAYLOAD_SHARE = 1448 / 1538


def line_rate(mbit: float) -> float:
    """Bytes per second that a link of `mbit` Mbit/s carries, headers included."""
    return mbit * 1e6 / 8


def goodput(mbit: float) -> float:
    """Bytes per second of payload that TCP gets through a link of `mbit` Mbit/s at MTU 1500."""
    return line_rate(mbit) * PAYLOAD_SHARE


def exposed(transfer: float, payload: Payload, backward: float) -> float:
    """Seconds per step that computing does not hide of a transfer.

    Gradients are sent bucket by bucket while backward computes the next ones, so at most `backward`
    is hidden. The last bucket leaves when backward has ended, so its part is never hidden.
    """
    return max(transfer - backward, transfer * last_bucket(payload))


def transfer_of(waited: float, payload: Payload, backward: float) -> float:
    """How many seconds a transfer takes when `waited` seconds per step are exposed: the inverse of
    `exposed`."""
    return min(waited + backward, waited / last_bucket(payload))


def last_bucket(payload: Payload) -> float:
    """The fraction of the gradients that is in the last bucket."""
    return min(1.0, payload.bucket / payload.bytes) if payload.bytes > 0 else 1.0


def sync_wait(
    strategy: Strategy,
    machines: int,
    payload: Payload,
    rate: float,
    backward: float,
    gpus: int = 1,
) -> float:
    """Seconds per step that a rank waits when each link carries `rate` bytes per second."""
    bytes_sent = strategy.bytes_per_step(machines, payload, gpus)
    return exposed(bytes_sent / rate, payload, backward) if bytes_sent else 0.0


def payload_of(start: RankStart) -> Payload:
    """The gradients as a rank's `start` line describes them; 0 bytes where it does not."""
    bucket: dict[str, Any] = {"bucket": start.bucket_mb * MIB} if start.bucket_mb else {}
    return Payload(float(start.gradient_bytes or 0.0), **bucket)


def strategy_of(start: RankStart) -> Strategy | None:
    """The strategy of a `start` line; None for one that this version does not know."""
    return known(start.sync or "allreduce")
