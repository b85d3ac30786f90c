"""Which failure came first, and what it means.

Clocks of different machines are not compared. On one machine the guard says which worker failed
first; between machines, an error that only says "a peer is gone" ranks below any other.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from contract.errors import BAD_INPUT, DATA_LOST, DIVERGED, OUT_OF_MEMORY, STOPPED
from launcher.during.pitfalls import explain

# Gaps have a limit: with `.*`, matching a line that repeats the first word takes time that grows
# with the square of its length.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|"
    r"connect(ion)? (to .{0,200})?refused|remote process has exited|ncclRemoteError|"
    r"timed? ?out (waiting|after)|timeout.{0,200}(barrier|store|allreduce|broadcast|recv|send)|"
    r"watchdog caught collective|failed to (recv|send).{0,200}got (0|\d+) bytes|"
    r"Connect timeout|DistNetworkError|DistStoreError|store->get|"
    r"gloo/transport.{0,200}(closed|reset|timeout|timed out|refused|Connect)",
    re.IGNORECASE,
)
# What NCCL prints in a process whose peer is gone: its watchdog then ends the process by SIGABRT,
# and C++ stack frames follow. The wording is that of torch 1.12 to 2.15 and NCCL 2.10 to 2.27.
NCCL_PEER_LOST = re.compile(
    r"watchdog caught collective|ncclRemoteError|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|taking the entire process down|"
    r"socket(Progress|Poll|Connect)\w{0,20}:? .{0,200}(closed|reset|timed out|refused)",
    re.IGNORECASE,
)
# Characters of a line that are looked at: these patterns take 0.2 s for twenty lines of 4096 that
# somebody made for them.
JUDGED = 1000
OWN_WORDS = re.compile(r"^trainer: ", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """Something that went wrong on one node, as it reached the control machine.

    `kind`: worker (a rank failed), launch (launch failed), gone (the machine, or the connection to
    it), guard (its guard was killed, or sends what no guard does), busy (another run has the
    machine), paused (the control machine did not run, so the lease ended).
    """

    host: str
    kind: str
    order: int
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    message: str | None = None
    last_lines: tuple[str, ...] = ()
    first_on_node: bool = True

    @cached_property
    def peer_lost(self) -> bool:
        """Whether the error only says that another process is gone."""
        aborted = self.signal == "SIGABRT"
        if self.kind != "worker" or self.exit_code in (OUT_OF_MEMORY, DATA_LOST):
            return False
        if self.exit_code == STOPPED:
            return True
        lines = [line[:JUDGED] for line in self.last_lines]
        if self.signal is None or aborted:
            own = self.exception or (aborted and OWN_WORDS.search("\n".join(lines)))
            if not own and NCCL_PEER_LOST.search("\n".join(lines)):
                return True
        if self.signal is not None:
            return False
        said = (self.exception or "\n".join(lines[-3:]))[: 3 * JUDGED]
        return bool(PEER_LOST.search(said) or NCCL_PEER_LOST.search(said))

    @property
    def silent(self) -> bool:
        """Whether another rank of its machine says why all of them ended."""
        told = self.exit_code in (BAD_INPUT, DATA_LOST, DIVERGED)
        return told and not OWN_WORDS.search("\n".join(self.last_lines))

    @property
    def disk_full(self) -> bool:
        """Whether this machine's full disk alone is at fault: others can go on without it."""
        text = "\n".join([self.exception or "", *self.last_lines[-3:]])
        return bool(re.search(r"No space left on device|Disk quota exceeded", text))


def first_of(failures: list[Failure]) -> Failure | None:
    """The failure that explains the others."""
    kinds = {"busy": -1, "worker": 0, "gone": 0, "paused": 0, "guard": 1, "launch": 2}

    def place(failure: Failure) -> tuple[bool, int, bool, bool, int]:
        kind, later = kinds[failure.kind], not failure.first_on_node
        return (failure.peer_lost, kind, failure.silent, later, failure.order)

    return min(failures, key=place, default=None)


def document(failure: Failure) -> dict[str, Any]:
    """The failure as attempts.json has it."""
    message, remedy = explain(failure)
    kept = asdict(failure)
    fields = ("host", "rank", "exit_code", "signal", "exception")
    return {
        **{name: kept[name] for name in fields},
        "message": message,
        "remedy": remedy,
        "last_lines": list(failure.last_lines),
    }
