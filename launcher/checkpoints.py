"""Which of the checkpoints that a script saved its next attempt goes on from ({last} of
RESUME_ARGS), and how every machine comes to have it.

A checkpoint is a file, or a folder as a whole, as Accelerate's save_state, the Trainer of
transformers and torch.distributed.checkpoint write it. Names come from the machines and are checked
as any (outputs.py); whether a file is whole is seen by its beginning and its end, before it is
sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from contract.errors import UserError
from contract.strategies import ATTACHED
from launcher.collect import NotHere, receive, staging
from launcher.machines.engine import Node
from launcher.outputs import OutputFile, listing, put
from launcher.plan.code import WORK

SAFE = ".safetensors"  # holds tensors alone
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tar", SAFE)
WITHIN = (*CHECKPOINTS, ".bin", ".distcp")  # what a folder has to have one of
# A folder that is a checkpoint, by its own name or by that of a file in it.
FOLDER = re.compile(
    r".*(check-?point|ckpt|step|epoch|iter|iteration)[-_=. ]?\d+|.*\.(ckpt|pth?)", re.I | re.S
)
INSIDE = re.compile(r"random_states_\d+\.pkl|trainer_state\.json|\.metadata")
HEAD, TAIL = 1 << 16, 1 << 10  # bytes of a file that are looked at
LONGEST = 100 << 20  # the header of a .safetensors
ZIP, ZIP_END = b"PK\3\4", b"PK\5\6"
OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,15}\s*,\s*(\d{1,15})\s*\]')
# A pickled dictionary whose first key is this one.
FIRST = rb"\x80[\x02-\x05](\x95.{8})?\}(q\x00|\x94)?\((X.{4}|\x8c.)"
OWN_STATE = re.compile(FIRST + re.escape(ATTACHED.encode()), re.S)
MOST_TRIES = 50


@dataclass(frozen=True)
class Checkpoint:
    """Its name below the folder that the script ran in, what it consists of, and when the last of
    that was written, by its machine's word."""

    name: str
    files: tuple[OutputFile, ...]
    unix: int

    @property
    def is_folder(self) -> bool:
        return self.files[0].name != self.name

    @property
    def stem(self) -> str:
        return self.name if self.is_folder else str(PurePosixPath(self.name).with_suffix(""))


def held_by(
    nodes: dict[str, Node], there: dict[str, str], folders: tuple[str, ...]
) -> dict[str, dict[str, Checkpoint]]:
    """Each machine's checkpoints by name, the newest first, in the order of `there`: clocks of
    machines are not compared. Of two that have one name but for their ends, the one that runs no
    code when it is loaded comes first."""
    held = {}
    for host, folder in there.items():
        try:
            files = listing(nodes[host], folder, folders)
        except NotHere:
            files = []
        whole = _whole(list(_checkpoints(files, folders)))
        newest: dict[str, int] = {}
        for checkpoint in whole:
            newest[checkpoint.stem] = max(checkpoint.unix, newest.get(checkpoint.stem, 0))
        whole.sort(key=lambda one: (-newest[one.stem], not one.name.endswith(SAFE)))
        held[host] = {checkpoint.name: checkpoint for checkpoint in whole}
    return held


def _checkpoints(files: list[OutputFile], folders: tuple[str, ...]) -> Iterator[Checkpoint]:
    names = {file.name for file in files}
    inside = {str(PurePosixPath(one).parent) for one in names if INSIDE.fullmatch(_last(one))}
    groups: dict[str, list[OutputFile]] = {}
    for file in files:
        groups.setdefault(_place(file.name, folders, inside), []).append(file)
    for name, some in groups.items():
        ends = CHECKPOINTS if name in names else WITHIN
        if any(file.name.endswith(ends) for file in some):
            yield Checkpoint(name, tuple(some), max(file.unix for file in some))


def _place(name: str, folders: tuple[str, ...], inside: set[str]) -> str:
    """The outermost folder that is a checkpoint with this file in it, or the file itself."""
    above = [str(parent) for parent in PurePosixPath(name).parents][-2::-1]  # without "."

    def is_checkpoint(folder: str) -> bool:
        below = any(folder.startswith(f"{output}/") for output in folders)
        return folder in inside or (below and FOLDER.fullmatch(_last(folder)) is not None)

    return next(filter(is_checkpoint, above), name)


def _last(name: str) -> str:
    return PurePosixPath(name).name


def _whole(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Without folders that have fewer files than the one before them: a rank that was killed has
    not written the rest."""
    least: dict[PurePosixPath, int] = {}  # the files of the newest older folder beside it
    whole = []
    for checkpoint in sorted(checkpoints, key=lambda one: -one.unix)[::-1]:
        parent, count = PurePosixPath(checkpoint.name).parent, len(checkpoint.files)
        if not checkpoint.is_folder or count >= least.get(parent, 0):
            whole.append(checkpoint)
        if checkpoint.is_folder:
            least[parent] = count
    return whole[::-1]


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that machines hold, those last from which an attempt went on that made no
    step. `held`: of each machine, `there` their folders of the run, `folder` the run's own here."""

    held: dict[str, dict[str, Checkpoint]]
    nodes: dict[str, Node]
    there: dict[str, str]
    folder: Path
    say: Callable[[str], None]
    unfit: Collection[str] = ()

    def own(self) -> str | None:
        """The newest intact checkpoint that every machine has of its own; None where none has any.
        Raises UserError, Unwritable."""
        for name in self._names():
            if all(name in kept and self._intact(h, kept[name]) for h, kept in self.held.items()):
                return name
        if any(self.held.values()):
            lack = [host for host, files in self.held.items() if not files]
            why = f"{', '.join(lack)} has none" if lack else "no intact one is on all machines"
            raise UserError(
                f"RESUME_FROM=self: each machine goes on from a checkpoint of its own, and {why}: "
                "leave it out, so that one file goes to all of them, or let the script save on "
                "every machine."
            )
        return None

    def spread(self, room: int) -> str | None:
        """Give the first machine's newest intact checkpoint, or the next one where it does not
        arrive here, to all machines. Returns its name, None where none arrived. Raises UserError,
        Unwritable."""
        for name in self._names():
            for host, kept in self.held.items():
                newest = kept.get(name)
                if newest and self._intact(host, newest) and self._give(host, newest, room):
                    return name
        return None

    def _names(self) -> list[str]:
        names = dict.fromkeys(name for kept in self.held.values() for name in kept)
        return sorted(names, key=lambda name: name in self.unfit)[:MOST_TRIES]

    def _source(self, host: str, name: str) -> str:
        return f"{self.there[host]}/{WORK}/{host}/{name}"

    def _intact(self, host: str, checkpoint: Checkpoint) -> bool:
        for file in checkpoint.files:
            with staging(self.folder) as scratch:
                try:
                    wrong = flaw(self.nodes[host], self._source(host, file.name), file, scratch)
                except NotHere:
                    return False
            if wrong == ATTACHED and checkpoint.is_folder:  # beside others, of a rank
                continue
            if wrong:
                if wrong != ATTACHED:
                    self.say(f"{host}: {file.name} is passed over: {wrong}")
                return False
        return True

    def _give(self, source: str, checkpoint: Checkpoint, room: int) -> bool:
        """Whether it arrived, and all others have it."""
        with staging(self.folder) as scratch:
            fresh: dict[str, tuple[int, Path]] = {}
            for number, file in enumerate(checkpoint.files):
                path = scratch / str(number)
                left = room - sum(size for size, _ in fresh.values())
                try:
                    size = receive(self.nodes[source], self._source(source, file.name), path, left)
                except NotHere:
                    return False
                if size is None or size > left or not (size or checkpoint.is_folder):
                    return False
                fresh[file.name] = size, path
            for host in (host for host in self.there if host != source):
                for name, (size, path) in fresh.items():
                    put(self.nodes[host], path, size, self._source(host, name))
        return True


def flaw(node: Node, source: str, file: OutputFile, scratch: Path) -> str | None:
    """Why this file of a machine is none to go on from; None for one that seems whole. ATTACHED:
    what tandem.sync keeps for a rank. Raises NotHere, OSError."""
    head = _piece(node, source, scratch / "head", HEAD, 0)
    if OWN_STATE.search(head):
        return ATTACHED
    if not head:
        return "it is empty" if file.name.endswith(CHECKPOINTS) else None
    if head.startswith(ZIP):
        tail = _piece(node, source, scratch / "tail", TAIL, max(0, file.size - TAIL))
        return None if ZIP_END in tail else "its end is missing"
    if file.name.endswith(SAFE):
        size = int.from_bytes(head[:8], "little")
        if size > min(LONGEST, file.size):
            return "its header is damaged"
        header = head[8:] if size <= HEAD - 8 else _piece(node, source, scratch / "more", size, 8)
        ends = map(int, OFFSETS.findall(header[:size]))
        return None if 8 + size + max(ends, default=0) <= file.size else "its end is missing"
    return None


def _piece(node: Node, source: str, target: Path, most: int, begin: int) -> bytes:
    if receive(node, source, target, most, begin) is None:
        raise NotHere("it is gone")
    return target.read_bytes()[:most]
