"""Where the ranks stand that have been silent for long: the answers to their guards' questions
(launcher/node/stacks.py), as one line for each place in the user's code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from boundary.run_files import MOST_RANKS
from contract.text import seconds
from report.files import Entry, natural_number, text, time_of
from report.read import Machine

LEAST = 5.0  # seconds of silence: those who were asked for another's failure stand anywhere
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/library/")


@dataclass(frozen=True)
class Standing:
    """A silent rank; `seconds` of silence by the last line of its machine."""

    host: str
    rank: int
    seconds: float
    place: str


def standings(machines: Iterable[Machine], attempt: int) -> list[Standing]:
    """Of all machines' newest answers, by rank."""
    found = []
    for machine in machines:
        line = machine.stacks
        ranks = line.get("ranks")
        if line.get("attempt") != attempt or not isinstance(ranks, dict):
            continue
        now = max(time_of(line.get("mono")) or 0.0, machine.mono)
        for name, entry in list(ranks.items())[:MOST_RANKS]:
            last = time_of(entry.get("last")) if isinstance(entry, dict) else None
            if last is not None and name.isdecimal() and len(name) < 10 and now - last >= LEAST:
                found.append(
                    Standing(machine.host, int(name), now - last, place_of(entry, machine.host))
                )
    return sorted(found, key=lambda standing: standing.rank)


def place_of(entry: Entry, host: str) -> str:
    """The deepest frame of the user's own code in the main thread, or why there is none."""
    threads = entry.get("threads")
    main = threads[0] if isinstance(threads, list) and threads else []
    frames = [frame for frame in map(frame_of, main) if frame] if isinstance(main, list) else []
    if frames:
        own = [frame for frame in frames if is_own(frame[0])]
        file, line, function = (own or frames)[0]
        *_, folder, name = ("", *PurePosixPath(file).parts)
        # A script runs in a folder with the machine's name.
        name = name if folder in ("", "/", host) else f"{folder}/{name}"
        return f"stands at {name}:{line}, in {function}"
    return STATES.get(str(text(entry.get("state"))), "did not answer where it stands")


STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "D": "waits for a disk or a share, and did not answer where it stands",
    "": "ended before it answered where it stands",
}


def frame_of(value: object) -> tuple[str, int, str] | None:
    """File, line and function; None for what is no frame."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    file, line, function = text(value[0]), natural_number(value[1]), text(value[2])
    return None if file is None or line is None or function is None else (file, line, function)


def is_own(file: str) -> bool:
    return not file.startswith("<") and not any(part in file for part in LIBRARIES)


def by_place(found: Sequence[Standing]) -> dict[str, str]:
    """A line for each place, with the ranks that stand there."""
    places: dict[str, list[Standing]] = {}
    for standing in found:
        places.setdefault(standing.place, []).append(standing)
    return {place: line_of(place, some) for place, some in places.items()}


def line_of(place: str, some: Sequence[Standing]) -> str:
    named = ", ".join(f"{one.rank} ({one.host})" for one in some[:4])
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    silent = seconds(max(one.seconds for one in some))
    return f"rank{'s' * (len(some) > 1)} {named}{more}, silent for {silent}: {place}"
