"""Finds the newest complete checkpoint that a program saved, and copies it to every machine before
the next attempt.

A checkpoint is a file, or a folder as a whole, as Accelerate's save_state, the Trainer of
transformers and torch.distributed.checkpoint write it; several machines may each have some files of
such a folder. The names come from the machines, and outputs.py checks them. Each file's beginning
and end show whether it is whole, before it is sent.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from contract.errors import UserError
from contract.strategies import ATTACHED
from launcher.collect import DISK_LEFT, NotHere, Unwritable, receive, staging
from launcher.folders import disk_free
from launcher.outputs import Listing, OutputFile, link, list_outputs, put, show_names
from launcher.plan.code import WORK
from launcher.site import RunSite
from launcher.terminal import waiting
from launcher.watch.attempts import not_copied

SAFE = ".safetensors"  # holds tensors alone
ENDINGS = (".pt", ".pth", ".ckpt", ".tar", SAFE)
ENDINGS_IN_FOLDER = (*ENDINGS, ".bin", ".distcp")
# A number that says when a checkpoint was saved; those of ranks and parts follow other words.
NUMBER = re.compile(r"(?:check-?point|ckpt|step|epoch|iter|iteration)[-_=. ]?0*(\d+)", re.I)
FOLDER = re.compile(rf".*{NUMBER.pattern}|.*\.(ckpt|pth?)", re.I | re.S)
NEWEST = re.compile(r"(.*[-_. ])?(last|latest|best)([-_. ].*)?", re.I | re.S)
# Files that libraries put into a folder that is a checkpoint, whatever its name.
INSIDE = re.compile(
    r"random_states_\d+\.pkl|trainer_state\.json|\.metadata|.*\.distcp|.*(model|optim)_states\.pt"
    r"|(.*[-_])?model-00001-of-\d+\..*",
    re.S,
)
# The beginning of a file by torch.save, whatever its ending: of today, and before torch 1.6.
TORCH = re.compile(
    rb"PK\x03\x04.{26,300}/data\.pkl|\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.S
)
# Small files beside checkpoints that name the newest, as DeepSpeed and detectron2 leave them.
POINTER = re.compile(r"(last|latest)\w*(\.txt|\.json)?")
HEAD, TAIL = 1 << 16, 1 << 10  # bytes of a file that are looked at
LONGEST = 100 << 20  # the header of a .safetensors, or a .metadata
ZIP, ZIP_END = b"PK\3\4", b"PK\5\6"
OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,15}\s*,\s*(\d{1,15})\s*\]')
PARTS = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")  # in a .metadata
DIGITS = re.compile(r"\d+")
SHARD = re.compile(r"\d+-of-(\d{1,9})")
# A pickled dictionary whose first key is this one.
FIRST = rb"\x80[\x02-\x05](\x95.{8})?\}(q\x00|\x94)?\((X.{4}|\x8c.)"
OWN_STATE = re.compile(FIRST + re.escape(ATTACHED.encode()), re.S)
MOST_TRIES, DEEPEST = 50, 16


def group_files(names: Iterable[str], outputs: tuple[str, ...]) -> dict[str, str]:
    """Map each file that belongs to a checkpoint to it: the outermost folder that is one, or the
    file itself."""
    paths, contents = [PurePosixPath(name) for name in names], dict[str, list[PurePosixPath]]()
    paths = [path for path in paths if len(path.parts) <= DEEPEST]
    for path in paths:
        for parent in [*path.parents][:-1]:
            contents.setdefault(str(parent), []).append(path.relative_to(parent))
    marked = {str(path.parent) for path in paths if INSIDE.fullmatch(path.name)}

    # Libraries mark their folders by certain files. Other folders count only below OUTPUT, and by
    # their names.
    def is_checkpoint(folder: str) -> bool:
        name = PurePosixPath(folder).name
        below = any(folder.startswith(f"{output}/") for output in outputs)
        if folder not in marked and not (below and FOLDER.fullmatch(name)):
            return False
        # It only holds checkpoints if names in it have another number, or say last or best.
        for path in contents[folder]:
            is_single = path.name.endswith(ENDINGS)
            if not path.name.endswith(ENDINGS_IN_FOLDER):
                continue
            texts = [text for text in path.parts[:-1] if FOLDER.fullmatch(text)]
            texts += [path.name] if is_single else []
            numbers = {number for text in texts for number in NUMBER.findall(text)}
            if numbers - {*NUMBER.findall(name)} or (is_single and NEWEST.fullmatch(path.stem)):
                return False
        return True

    folders = {folder for folder in contents if is_checkpoint(folder)}
    checkpoint_of = {}
    for path in paths:
        parents = map(str, [*path.parents][-2::-1])  # without "."
        checkpoint_of[str(path)] = next((p for p in parents if p in folders), str(path))
    holds_state = {
        checkpoint
        for name, checkpoint in checkpoint_of.items()
        if name.endswith(ENDINGS if name == checkpoint else ENDINGS_IN_FOLDER)
    }
    return {name: place for name, place in checkpoint_of.items() if place in holds_state}


def hand_over(
    site: RunSite, outputs: tuple[str, ...], has_last: bool, from_self: bool
) -> str | None:
    """Find the checkpoint from which the next attempt continues, and copy it to all machines; None
    if there is none. `has_last`: {last} in RESUME_ARGS gives its name to the program, which
    otherwise looks for it. `from_self`: each machine continues from a file that it saved. Raises
    UserError."""
    with waiting(site.terminal, "looking for the newest checkpoint"):
        search = Search(site, outputs, site.attempts.unfit(site.folder) if has_last else ())
    room = max(0, disk_free() - DISK_LEFT)
    try:
        with waiting(site.terminal, "sending the newest checkpoint to all machines"):
            name = search.find_on_all() if from_self else search.copy_newest(room)
    except Unwritable as error:
        raise UserError(not_copied(site.folder, error)) from None
    if search.rejected and not has_last:
        raise UserError(
            f"{search.rejected[0]}: RESUME_ARGS has no {{last}}, so the script searches for "
            "its checkpoint itself, and would find different ones on the machines. Resume "
            "the run when all its machines answer, or type RESUME_ARGS with {last}."
        )
    # A machine that does not answer may have the files that are missing: to begin again now would
    # throw its steps away.
    absent = [host for host in search.last_hosts if host not in search.checkpoints]
    if name is None and absent and (search.rejected or search.unlisted):
        raise UserError(
            f"there is no complete checkpoint without the files of {', '.join(absent)}: resume "
            "the run when all of its machines answer."
        )
    if name is not None:
        shown = show_names([name])
        site.terminal.say(f"the script continues from {shown}, which all machines have")
        if absent and any(
            groups[name][0].name != name for groups in search.checkpoints.values() if name in groups
        ):
            site.terminal.say(f"{', '.join(absent)} may have more files of it")
        return name
    hint = ""
    if sent := [*dict.fromkeys(search.sent)]:
        hint = f"; Tandem sent {show_names(sent)}, so this run did not save it"
    if other_names := [*dict.fromkeys(f.name for o in search.other_files.values() for f in o)]:
        hint += f"; {show_names(other_names)} is no checkpoint by its name and contents"
    site.terminal.say(f"no checkpoint was found in {', '.join(outputs)}{hint}: starting again")
    return None


class Search:
    """A search for the checkpoint from which the next attempt can continue.

    `checkpoints` has the files of each by machine and name, the newest first, and `other_files` the
    files that belong to none. `rejected` collects which checkpoints lack files or did not arrive.
    """

    def __init__(self, site: RunSite, outputs: tuple[str, ...], unfit: Collection[str] = ()):
        self.nodes, self.folder, self.say = site.machines.nodes, site.folder, site.terminal.say
        self.run_folders, self.unfit = site.folders, unfit
        attempt = (site.attempts.list or [{"ranks": {}, "nodes": site.folders}])[-1]
        self.last_hosts = [*attempt["nodes"]]
        self.world_size = sum(map(len, attempt["ranks"].values()))
        self.checkpoints: dict[str, dict[str, list[OutputFile]]] = {}
        self.other_files: dict[str, list[OutputFile]] = {}
        self.links: dict[str, dict[str, str]] = {}
        self.sent: list[str] = []
        self.rejected: list[str] = []
        self.unlisted = False
        # Times of different machines are not compared: the first machine that has one decides.
        hosts = [host for host in self.last_hosts if host in site.folders]
        hosts += [host for host in site.folders if host not in hosts]
        listings: dict[str, Listing] = {}
        for host in hosts:
            try:
                listings[host] = list_outputs(self.nodes[host], site.folders[host], outputs)
            except NotHere as error:
                self.unlisted = True
                self.say(f"{host}: its checkpoints are unknown: {error}")
        # The file that makes a folder a checkpoint may be on one of several machines.
        checkpoint_of = group_files({f.name for o in listings.values() for f in o.files}, outputs)
        for host, listing in listings.items():
            groups, stems = dict[str, list[OutputFile]](), dict[str, list[str]]()
            for file in listing.files:
                groups.setdefault(checkpoint_of.get(file.name, ""), []).append(file)
            self.other_files[host], self.links[host] = groups.pop("", []), listing.links
            self.sent += listing.skipped["sent"][1] if "sent" in listing.skipped else []
            for name, files in groups.items():
                stem = str(PurePosixPath(name).with_suffix("")) if files[0].name == name else name
                stems.setdefault(stem, []).append(name)
            # Of files with the same stem, the one that runs no code when it is loaded comes first.
            names = [
                n for s in stems.values() for n in sorted(s, key=lambda n: not n.endswith(SAFE))
            ]
            self.checkpoints[host] = {name: groups[name] for name in names}

    def newest_first(self) -> list[str]:
        """Merge the machines' names. The first machine's order counts; a name that it lacks comes
        before the names that are older on another machine of the last attempt."""
        if not any(self.checkpoints.values()):
            # Take files with another ending if torch.save wrote them.
            for host, files in self.other_files.items():
                for file in files[:MOST_TRIES]:
                    if TORCH.match(self.read(host, file.name, TAIL)):
                        self.checkpoints[host][file.name] = [file]
        # `fresh` are the names that the order lacks, up to the next one that it has.
        order: list[str] = []
        for host, names in self.checkpoints.items():
            position, fresh = 0, list[str]()
            for name in [*names][: 10 * MOST_TRIES]:
                if name not in order:
                    fresh.append(name)
                elif host in self.last_hosts:
                    position = max(position, order.index(name))
                    order[position:position] = fresh
                    position, fresh = position + len(fresh), []
            order += fresh
        # From an unfit one the last attempt failed before its first step: it is tried last.
        return sorted(order, key=lambda name: name in self.unfit)[:MOST_TRIES]

    def find_on_all(self) -> str | None:
        """Return the newest checkpoint that every machine has saved itself, None if no machine has
        any. Raises UserError, Unwritable."""
        for name in self.newest_first():
            if not self.unlisted and all(
                name in files
                and not self.missing(name, {file.name: host for file in files[name]}, ())
                and all(self.is_intact(host, file) for file in files[name])
                for host, files in self.checkpoints.items()
            ):
                return name
        if any(self.checkpoints.values()):
            lack = [host for host, names in self.checkpoints.items() if not names]
            reason = (
                f"{', '.join(lack)} has none"
                if lack
                else ("no intact checkpoint is on all machines")
            )
            raise UserError(
                "RESUME_FROM=self: each machine continues from a checkpoint that it saved, and "
                f"{reason}: leave it out, so that one file goes to all of them, or let the script "
                "save on every machine."
            )
        return None

    def copy_newest(self, room: int) -> str | None:
        """Copy the newest complete checkpoint to all machines, or the next one if it does not
        arrive here. Returns its name, None if none arrived. Raises UserError, Unwritable."""
        names = self.newest_first()
        for position, name in enumerate(names):
            by_host = {host: g[name] for host, g in self.checkpoints.items() if name in g}
            # Another machine may have files from before the last attempt under the same name.
            by_host = {h: files for h, files in by_host.items() if h in self.last_hosts} or by_host
            hosts = {file.name: host for host, files in by_host.items() for file in files}
            if reason := self.missing(name, hosts, names[position + 1 :]):
                held_by = "; ".join(
                    f"{host} has {show_names([file.name for file in files])}"
                    for host, files in by_host.items()
                )
                self.reject(f"{show_names([name])} is not complete: {reason} ({held_by})")
            elif self.copy(name, by_host, room):
                return name
        return None

    def reject(self, reason: str) -> bool:
        self.rejected.append(reason)
        self.say(reason)
        return False

    def missing(self, name: str, hosts: dict[str, str], older: Iterable[str]) -> str | None:
        """Word what a checkpoint lacks, whose files are on these `hosts`; None if it seems whole.
        `older`: names of checkpoints that were saved before it."""
        # A single file is judged by its contents (is_intact).
        if name in hosts:
            return None
        for file, host in hosts.items():
            folder = PurePosixPath(file).parent
            if file.endswith(".distcp") and f"{folder}/.metadata" not in hosts:
                return f"{folder}/.metadata, which rank 0 writes last, is missing"
            if file == f"{folder}/.metadata":
                names = [name.decode() for name in PARTS.findall(self.read(host, file, LONGEST))]
                if missing := sorted({f"{folder}/{name}" for name in names} - {*hosts}):
                    return f"{show_names(missing)} is missing"
        shards = Counter[tuple[str, int]]()
        for path in (PurePosixPath(file) for file in hosts if file.endswith(ENDINGS_IN_FOLDER)):
            if match := SHARD.search(path.name):
                shards[str(path.with_name(SHARD.sub("#", path.name))), int(match[1])] += 1
        for (kind, total), count in shards.items():
            if count < total:
                return f"only {count} of {total} files such as {show_names([kind])} exist"
        # A rank that was killed has not written the files that the folder before this one has.
        kinds = Counter(DIGITS.sub("#", str(PurePosixPath(f).relative_to(name))) for f in hosts)
        folder = PurePosixPath(name).parent
        for older_name in (o for o in older if PurePosixPath(o).parent == folder):
            files = {f.name for g in self.checkpoints.values() for f in g.get(older_name, ())}
            if older_name in files:  # a single file
                continue
            kinds_before = [
                DIGITS.sub("#", str(PurePosixPath(f).relative_to(older_name))) for f in files
            ]
            for kind, count in Counter(kinds_before).items():
                if kinds[kind] < min(count, self.world_size):
                    return f"only {kinds[kind]} of {count} files such as {show_names([kind])} exist"
            break
        return None

    def copy(self, name: str, by_host: dict[str, list[OutputFile]], room: int) -> bool:
        """Copy a checkpoint to all machines. Each file is read once, from the first machine that
        has an intact one. Returns whether all machines have it. Raises UserError, Unwritable."""
        sources: dict[str, dict[str, OutputFile]] = {}
        for host, files in by_host.items():
            for file in files:
                sources.setdefault(file.name, {})[host] = file
            # The pointer to a checkpoint goes with it: libraries read the name from there.
            for file in self.other_files[host]:
                folder, _, file_name = file.name.rpartition("/")
                is_beside = folder == name.rpartition("/")[0] and file.size < TAIL
                if is_beside and POINTER.fullmatch(file_name):
                    sources.setdefault(file.name, {host: file})
        # All files are here before any is sent on: no machine gets half of a checkpoint.
        with staging(self.folder) as scratch:
            fresh: dict[str, tuple[str, int, Path]] = {}
            for number, (file_name, copies) in enumerate(sources.items()):
                reason = ""
                for host, file in copies.items():
                    if not self.is_intact(host, file, file_name == name):
                        continue
                    path = scratch / f"{number}-{host}"
                    try:
                        size = receive(self.nodes[host], self.source(host), file_name, path, room)
                    except NotHere as error:
                        size, reason = None, str(error)
                    if size is not None and size <= room:
                        fresh[file_name], room = (host, size, path), room - size
                        break
                    reason = reason or "it is gone, or the control node's disk is full"
                if file_name not in fresh:
                    text = f"{show_names([name])} did not arrive: {reason}"
                    return bool(reason) and self.reject(text)
            for host in self.run_folders:
                self.give(host, name, fresh)
                for source in by_host:
                    self.copy_links(name, source, host)
        return True

    def give(self, host: str, name: str, fresh: dict[str, tuple[str, int, Path]]) -> None:
        """Write these files of a checkpoint to a machine: of each its source, size, and copy."""
        for file_name, (source, size, path) in fresh.items():
            if host == source:
                continue
            if POINTER.fullmatch(posixpath.basename(file_name)) and file_name != name:
                # It may say where the checkpoint is on the machine that wrote it.
                text = self.localize(os.fsdecode(path.read_bytes()), source, host)
                path = path.with_name(f"{path.name}-for-{host}")
                size = path.write_bytes(os.fsencode(text))
            put(self.nodes[host], path, size, self.source(host), file_name)

    def copy_links(self, name: str, source: str, host: str) -> None:
        """Make on `host` the links to a checkpoint, such as `last.ckpt`, that its folder on
        `source` has."""
        folder = posixpath.dirname(name)
        for link_name, target in self.links[source].items():
            link_folder, base_name = posixpath.split(link_name)
            if not (base_name.endswith(ENDINGS) or NEWEST.fullmatch(base_name)):
                continue
            # A target from / is a path of the source; any other begins in the link's folder.
            leads = self.localize(target, source, host).removeprefix(f"{self.source(host)}/")
            inside = posixpath.normpath(leads if leads != target else f"{link_folder}/{target}")
            if host != source and link_folder == folder and inside == name:
                link(self.nodes[host], self.source(host), link_name, posixpath.basename(name))

    def localize(self, text: str, source: str, host: str) -> str:
        """Replace, in paths of a machine, the folder that the run has there by another's."""
        tail = "/".join(self.source(source).split("/")[-3:])  # above it there may be a link
        pattern = rf"/(?:[^\s\"'/]+/)*{re.escape(tail)}(?=/)"
        return re.sub(pattern, lambda _: self.source(host), text)

    def source(self, host: str) -> str:
        return f"{self.run_folders[host]}/{WORK}/{host}"

    def read(self, host: str, name: str, max_bytes: int, begin: int = 0) -> bytes:
        """Return a piece of a machine's file; nothing if it does not arrive. Raises Unwritable."""
        with staging(self.folder) as scratch:
            path = scratch / "piece"
            try:
                receive(self.nodes[host], self.source(host), name, path, max_bytes, begin)
            except NotHere:
                return b""
            return path.read_bytes()[:max_bytes] if path.exists() else b""

    def is_intact(self, host: str, file: OutputFile, is_single: bool = True) -> bool:
        """Return whether an attempt can continue from a file, as far as its two ends show."""
        head = self.read(host, file.name, HEAD)
        # The state of a rank's tandem.sync has no weights, so by itself it is no checkpoint.
        if OWN_STATE.search(head):
            return not is_single
        problem = None
        if not head and file.name.endswith(ENDINGS):
            problem = "it is empty, or gone"
        # A zip ends with its directory, which torch.save writes last.
        elif head.startswith(ZIP):
            tail = self.read(host, file.name, TAIL, max(0, file.size - TAIL))
            problem = None if ZIP_END in tail else "its end is missing"
        elif file.name.endswith(SAFE):
            size = int.from_bytes(head[:8], "little")
            if size > min(LONGEST, file.size):
                problem = "its header is damaged"
            else:
                header = head[8:] if size <= HEAD - 8 else self.read(host, file.name, size, 8)
                ends = map(int, OFFSETS.findall(header[:size]))
                is_whole = 8 + size + max(ends, default=0) <= file.size
                problem = None if is_whole else "its end is missing"
        if problem:
            self.say(f"{host}: {show_names([file.name])} is skipped: {problem}")
        return problem is None
