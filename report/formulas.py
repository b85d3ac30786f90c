"""The formulas of all predictions, with their sources; bench/verdict.md explains them.

Units: bytes, seconds, bytes per second; `gpus` is the number of ranks on each machine.
"""

from __future__ import annotations

from boundary.run_files import RankStart
from contract.strategies import Payload, Strategy, parse_or_none

# Ethernet at MTU 1500 carries 1448 bytes of TCP payload in 1538 bytes on the wire.
PAYLOAD_SHARE = 1448 / 1538


def line_rate(mbit: float) -> float:
    """Return the bytes per second, headers included, of a link of `mbit` Mbit/s."""
    return mbit * 1e6 / 8


def goodput(mbit: float) -> float:
    """Return the bytes per second of TCP payload over a link of `mbit` Mbit/s at MTU 1500."""
    return line_rate(mbit) * PAYLOAD_SHARE


def exposed(transfer: float, payload: Payload, backward: float) -> float:
    """Return the seconds per step of a transfer that computing does not hide."""
    # Gradients are sent bucket by bucket while backward computes the next ones, so at most
    # `backward` is hidden. The last bucket leaves after backward has ended, so its time is never
    # hidden.
    return max(transfer - backward, transfer * last_bucket(payload))


def transfer_of(waited: float, payload: Payload, backward: float) -> float:
    """Return the seconds of a transfer whose exposed seconds are `waited`: inverts `exposed`."""
    return min(waited + backward, waited / last_bucket(payload))


def last_bucket(payload: Payload) -> float:
    """Return the fraction of the gradients that is in the last bucket."""
    return min(1.0, payload.bucket / payload.bytes) if payload.bytes > 0 else 1.0


def sync_wait(
    strategy: Strategy, machines: int, payload: Payload, rate: float, backward: float, gpus: int = 1
) -> float:
    """Return the seconds per step that a rank waits over links of `rate` bytes per second."""
    bytes_sent = strategy.bytes_per_step(machines, payload, gpus)
    return exposed(bytes_sent / rate, payload, backward) if bytes_sent else 0.0


def strategy_of(start: RankStart) -> Strategy | None:
    """Return the strategy of a `start` line; None if this version does not know it."""
    return parse_or_none(start.sync or "allreduce")
