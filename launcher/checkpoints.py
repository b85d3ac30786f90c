"""Finds the newest complete checkpoint that a script saved, and copies it to every machine before
the next attempt. handover.py calls `hand_over_newest`.

A checkpoint is a file, or a folder as a whole, as Accelerate's save_state, the Trainer of
transformers and torch.distributed.checkpoint write it; several machines may each have some files of
such a folder. The names come from the machines, and outputs.py checks them. Each file's beginning
and end show whether the file is whole, before it is sent; no tensor is read.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from contract.errors import UserError
from contract.strategies import ATTACHED
from launcher.collect import DISK_RESERVE, NotCopied, Unwritable, receive_file, staging
from launcher.folders import disk_free
from launcher.outputs import (
    OutputFile,
    OutputListing,
    list_outputs,
    make_link,
    show_names,
    write_file,
)
from launcher.plan.code import WORK
from launcher.site import RunSite
from launcher.terminal import waiting
from launcher.watch.attempts import explain_uncopied_files

SAFETENSORS = ".safetensors"  # holds only tensors: loading it runs no code
ENDINGS = (".pt", ".pth", ".ckpt", ".tar", SAFETENSORS)
ENDINGS_IN_FOLDER = (*ENDINGS, ".bin", ".distcp")
# step_0500, epoch=3, checkpoint-12 say when a checkpoint was saved; rank0 and 00001-of-2 do not.
SAVE_NUMBER = re.compile(r"(?:check-?point|ckpt|step|epoch|iter|iteration)[-_=. ]?0*(\d+)", re.I)
CHECKPOINT_FOLDER = re.compile(rf".*{SAVE_NUMBER.pattern}|.*\.(ckpt|pth?)", re.I | re.S)
# last, model_best, latest-v1: names for a checkpoint without its number.
NEWEST_NAME = re.compile(r"(.*[-_. ])?(last|latest|best)([-_. ].*)?", re.I | re.S)
# Files that libraries put into a folder that is a checkpoint, whatever its name.
FOLDER_MARKS = re.compile(
    r"random_states_\d+\.pkl|trainer_state\.json|\.metadata|.*\.distcp|.*(model|optim)_states\.pt"
    r"|(.*[-_])?model-00001-of-\d+\..*",
    re.S,
)
# The beginning of a file that torch.save wrote: today a zip with data.pkl, and before torch 1.6 a
# pickle of a magic number.
TORCH_HEAD = re.compile(
    rb"PK\x03\x04.{26,300}/data\.pkl|\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.S
)
# Small files beside checkpoints that name the newest: DeepSpeed's `latest`, `last_checkpoint` of
# detectron2.
POINTER_NAME = re.compile(r"(last|latest)\w*(\.txt|\.json)?")
HEAD_BYTES, TAIL_BYTES = 1 << 16, 1 << 10  # how much of a file's two ends is read
MAX_HEADER_BYTES = 100 << 20  # of a .safetensors, or of a .metadata
ZIP_HEAD, ZIP_DIRECTORY_END = b"PK\3\4", b"PK\5\6"
# "data_offsets":[0,4096] in the header of a .safetensors: where a tensor begins and ends.
DATA_OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,15}\s*,\s*(\d{1,15})\s*\]')
DISTCP_NAME = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")  # __0_0.distcp, in a .metadata
SHARD_NUMBER = re.compile(r"\d+-of-(\d{1,9})")  # 00001-of-00003
DIGITS = re.compile(r"\d+")
# A pickled dictionary whose first key is ATTACHED: the state of tandem.sync.
SYNC_STATE = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\}(q\x00|\x94)?\((X.{4}|\x8c.)" + re.escape(ATTACHED.encode()),
    re.S,
)
# Limits for what a script may have written: checkpoints that are looked at, folders above a file.
MAX_TRIES, MAX_DEPTH = 50, 16


class FetchedFile(NamedTuple):
    """A copy of a checkpoint's file on the control node, and the machine that it came from."""

    host: str
    size: int
    path: Path


def group_files(names: Iterable[str], outputs: tuple[str, ...]) -> dict[str, str]:
    """Return {file: checkpoint} for the files that belong to a checkpoint. A checkpoint is the
    outermost folder that looks like one, or a single file. `outputs`: the folders of OUTPUT."""
    paths = [PurePosixPath(name) for name in names]
    paths = [path for path in paths if len(path.parts) <= MAX_DEPTH]
    contents: dict[str, list[PurePosixPath]] = {}  # by folder; the paths begin in that folder
    # The last of a path's parents is `.`: out/run/a.pt has out/run, out and `.`.
    for path in paths:
        for parent in list(path.parents)[:-1]:
            contents.setdefault(str(parent), []).append(path.relative_to(parent))
    marked = {str(path.parent) for path in paths if FOLDER_MARKS.fullmatch(path.name)}
    checkpoint_folders = {
        folder
        for folder, inner_paths in contents.items()
        if is_checkpoint_folder(folder, inner_paths, folder in marked, outputs)
    }
    checkpoint_of = {}
    for path in paths:
        outermost_first = map(str, reversed(list(path.parents)[:-1]))
        folders = (folder for folder in outermost_first if folder in checkpoint_folders)
        checkpoint_of[str(path)] = next(folders, str(path))
    # A checkpoint has at least one file that can hold a model's state.
    holds_state = {
        checkpoint
        for name, checkpoint in checkpoint_of.items()
        if name.endswith(ENDINGS if name == checkpoint else ENDINGS_IN_FOLDER)
    }
    return {
        name: checkpoint for name, checkpoint in checkpoint_of.items() if checkpoint in holds_state
    }


def is_checkpoint_folder(
    folder: str, inner_paths: Iterable[PurePosixPath], is_marked: bool, outputs: tuple[str, ...]
) -> bool:
    """Return whether a folder is one checkpoint, and not a folder of several."""
    # Libraries mark their folders by certain files. Other folders count only below OUTPUT, and only
    # if their names look like that of a checkpoint.
    name = PurePosixPath(folder).name
    is_output = any(folder.startswith(f"{output}/") for output in outputs)
    if not is_marked and not (is_output and CHECKPOINT_FOLDER.fullmatch(name)):
        return False
    # A folder epoch_3 with step_100.pt or last.pt holds several checkpoints: the names inside have
    # another number than the folder's name, or say last or best.
    for path in inner_paths:
        if not path.name.endswith(ENDINGS_IN_FOLDER):
            continue
        texts = [text for text in path.parts[:-1] if CHECKPOINT_FOLDER.fullmatch(text)]
        has_ending = path.name.endswith(ENDINGS)  # the file may be a checkpoint by itself
        texts += [path.name] if has_ending else []
        numbers = {number for text in texts for number in SAVE_NUMBER.findall(text)}
        if numbers - {*SAVE_NUMBER.findall(name)}:
            return False
        if has_ending and NEWEST_NAME.fullmatch(path.stem):
            return False
    return True


def count_patterns(folder: str, files: Iterable[str]) -> Counter[str]:
    """Count a folder's files by their names without numbers: {"optim_#.bin": 2, "config": 1}."""
    return Counter(DIGITS.sub("#", str(PurePosixPath(f).relative_to(folder))) for f in files)


def hand_over_newest(
    site: RunSite, outputs: tuple[str, ...], has_last: bool, from_self: bool
) -> str | None:
    """Find the checkpoint from which the next attempt continues, copy it to all machines, and
    return its name; None if there is none. `has_last`: RESUME_ARGS has {last}, which becomes the
    name; otherwise the script searches for the newest file itself. `from_self`: each machine
    continues from a file that it saved, so nothing is copied. Raises UserError."""
    with waiting(site.terminal, "looking for the newest checkpoint"):
        unusable = site.attempts.find_unusable_checkpoints(site.folder) if has_last else ()
        search = Search(site, outputs, unusable)
    free_bytes = max(0, disk_free() - DISK_RESERVE)
    try:
        with waiting(site.terminal, "sending the newest checkpoint to all machines"):
            name = search.find_on_all() if from_self else search.copy_newest(free_bytes)
    except Unwritable as error:
        raise UserError(explain_uncopied_files(site.folder, error)) from None
    if search.rejected and not has_last:
        raise UserError(
            f"{search.rejected[0]}: RESUME_ARGS has no {{last}}, so the script searches for "
            "its checkpoint itself, and would find different ones on the machines. Resume "
            "the run when all its machines answer, or type RESUME_ARGS with {last}."
        )
    # A machine that does not answer may have the files that are missing. If the run began again
    # now, the steps in these files would be lost.
    absent = [host for host in search.last_hosts if host not in search.checkpoints]
    if name is None and absent and (search.rejected or search.has_unlisted):
        raise UserError(
            f"there is no complete checkpoint without the files of {', '.join(absent)}: resume "
            "the run when all of its machines answer."
        )
    if name is not None:
        shown = show_names([name])
        site.terminal.say(f"the script continues from {shown}, which all machines have")
        # A checkpoint that is a folder may have more files on a machine that does not answer.
        files_by_host = search.files_of(name)
        if absent and any(files[0].name != name for files in files_by_host.values()):
            site.terminal.say(f"{', '.join(absent)} may have more files of it")
        return name
    hint = ""
    if sent := [*dict.fromkeys(search.sent)]:
        hint = f"; Tandem sent {show_names(sent)}, so this run did not save it"
    other_files = [file for files in search.other_files.values() for file in files]
    if other_names := [*dict.fromkeys(file.name for file in other_files)]:
        hint += f"; {show_names(other_names)} is no checkpoint by its name and contents"
    site.terminal.say(f"no checkpoint was found in {', '.join(outputs)}{hint}: starting again")
    return None


class Search:
    """A search for the checkpoint from which the next attempt can continue. `checkpoints`:
    {machine: {checkpoint: its files}}, the newest first. `other_files`: by machine, the files that
    belong to no checkpoint. `links`: {machine: {name: target}}. `sent`: files that came with the
    code. `rejected`: sentences on checkpoints that lack files or did not arrive.
    `has_unlisted`: a machine did not list its files. `unusable`: checkpoints from which earlier
    attempts could not continue. `last_hosts`, `world_size`: of the last attempt."""

    def __init__(self, site: RunSite, outputs: tuple[str, ...], unusable: Collection[str] = ()):
        self.nodes, self.folder, self.say = site.machines.nodes, site.folder, site.terminal.say
        self.run_folders, self.unusable = site.folders, unusable
        # Before the first attempt, every machine counts as a machine of the last attempt.
        last_attempt = (site.attempts.list or [{"ranks": {}, "nodes": site.folders}])[-1]
        self.last_hosts = [*last_attempt["nodes"]]
        self.world_size = sum(map(len, last_attempt["ranks"].values()))
        self.checkpoints: dict[str, dict[str, list[OutputFile]]] = {}
        self.other_files: dict[str, list[OutputFile]] = {}
        self.links: dict[str, dict[str, str]] = {}
        self.sent: list[str] = []
        self.rejected: list[str] = []
        self.has_unlisted = False
        # Times of different machines are not compared: the first machine that has a checkpoint
        # decides. The machines of the last attempt come first, since they have the newest.
        hosts = [host for host in self.last_hosts if host in self.run_folders]
        hosts += [host for host in self.run_folders if host not in hosts]
        listings: dict[str, OutputListing] = {}
        for host in hosts:
            try:
                listings[host] = list_outputs(self.nodes[host], self.run_folders[host], outputs)
            except NotCopied as error:
                self.has_unlisted = True
                self.say(f"{host}: its checkpoints are unknown: {error}")
        # All names are grouped at once, because the file that marks a folder as a checkpoint may be
        # on one of several machines.
        all_names = {file.name for listing in listings.values() for file in listing.files}
        checkpoint_of = group_files(all_names, outputs)
        for host, listing in listings.items():
            groups: dict[str, list[OutputFile]] = {}  # by checkpoint; "" for files without one
            for file in listing.files:
                groups.setdefault(checkpoint_of.get(file.name, ""), []).append(file)
            self.other_files[host], self.links[host] = groups.pop("", []), listing.links
            # A value of `skipped` is (count, first names).
            self.sent += listing.skipped["sent"][1] if "sent" in listing.skipped else []
            # Of 5.pt and 5.safetensors, the .safetensors comes first: loading it runs no code.
            same_stem: dict[str, list[str]] = {}
            for name, files in groups.items():
                is_file = files[0].name == name
                stem = str(PurePosixPath(name).with_suffix("")) if is_file else name
                same_stem.setdefault(stem, []).append(name)
            names = [
                name
                for stem_names in same_stem.values()
                for name in sorted(stem_names, key=lambda name: not name.endswith(SAFETENSORS))
            ]
            self.checkpoints[host] = {name: groups[name] for name in names}

    def newest_first(self) -> list[str]:
        """Return up to MAX_TRIES names of checkpoints, merged from the orders of all machines. The
        first machine's order counts; a name that it lacks comes before the names that are older on
        another machine of the last attempt."""
        if not any(self.checkpoints.values()):
            # Without any known ending, the files that torch.save wrote become checkpoints.
            for host, files in self.other_files.items():
                for file in files[:MAX_TRIES]:
                    if TORCH_HEAD.match(self.read_piece(host, file.name, TAIL_BYTES)):
                        self.checkpoints[host][file.name] = [file]
        # [3, 1] and [4, 3, 2, 1] become [4, 3, 2, 1]: new names are inserted before the next name
        # that `order` already has.
        order: list[str] = []
        for host, names in self.checkpoints.items():
            position, new_names = 0, list[str]()
            for name in [*names][: 10 * MAX_TRIES]:  # each name is searched in the whole order
                if name not in order:
                    new_names.append(name)
                elif host in self.last_hosts:
                    position = max(position, order.index(name))
                    order[position:position] = new_names
                    position, new_names = position + len(new_names), []
            order += new_names
        # An attempt from an unusable checkpoint failed before its first step, so these come last.
        return sorted(order, key=lambda name: name in self.unusable)[:MAX_TRIES]

    def find_on_all(self) -> str | None:
        """Return the newest checkpoint that every machine has saved itself; None if no machine has
        any. Raises UserError, Unwritable."""
        for name in self.newest_first():
            if not self.has_unlisted and all(
                name in checkpoints
                and not self.describe_missing_files(
                    name, {file.name: host for file in checkpoints[name]}, ()
                )
                and all(self.is_intact(host, file) for file in checkpoints[name])
                for host, checkpoints in self.checkpoints.items()
            ):
                return name
        if any(self.checkpoints.values()):
            reason = "no intact checkpoint is on all machines"
            if hosts := [host for host, names in self.checkpoints.items() if not names]:
                reason = f"{', '.join(hosts)} has none"
            raise UserError(
                "RESUME_FROM=self: each machine continues from a checkpoint that it saved, and "
                f"{reason}: leave it out, so that one file goes to all of them, or let the script "
                "save on every machine."
            )
        return None

    def copy_newest(self, free_bytes: int) -> str | None:
        """Copy the newest complete checkpoint to all machines. If it does not arrive on the control
        node, whose disk has `free_bytes`, copy the next one. Returns the name of the checkpoint,
        None if none arrived. Raises UserError, Unwritable."""
        names = self.newest_first()
        for position, name in enumerate(names):
            by_host = self.files_of(name)
            # A machine outside the last attempt may have older files under the same name.
            by_host = {h: by_host[h] for h in by_host if h in self.last_hosts} or by_host
            hosts = {file.name: host for host, files in by_host.items() for file in files}
            if reason := self.describe_missing_files(name, hosts, names[position + 1 :]):
                held_by = "; ".join(
                    f"{host} has {show_names([file.name for file in files])}"
                    for host, files in by_host.items()
                )
                self.reject(f"{show_names([name])} is not complete: {reason} ({held_by})")
            elif self.copy_to_all(name, by_host, free_bytes):
                return name
        return None

    def files_of(self, name: str) -> dict[str, list[OutputFile]]:
        """Return the files of a checkpoint, by machine."""
        return {
            host: files_by_name[name]
            for host, files_by_name in self.checkpoints.items()
            if name in files_by_name
        }

    def reject(self, reason: str) -> None:
        """Report why a checkpoint is not used, and remember the reason."""
        self.rejected.append(reason)
        self.say(reason)

    def describe_missing_files(
        self, name: str, hosts: Mapping[str, str], older: Iterable[str]
    ) -> str | None:
        """Return a clause on what a checkpoint lacks; None if all of its files seem to exist.
        `hosts`: a machine for each of its files. `older`: checkpoints that were saved before it."""
        # A single file is judged by its contents (is_intact).
        if name in hosts:
            return None
        # torch.distributed.checkpoint: .metadata, which lists the __0_0.distcp of all ranks.
        for file, host in hosts.items():
            folder = PurePosixPath(file).parent
            if file.endswith(".distcp") and f"{folder}/.metadata" not in hosts:
                return f"{folder}/.metadata, which rank 0 writes last, is missing"
            if file == f"{folder}/.metadata":
                metadata = self.read_piece(host, file, MAX_HEADER_BYTES)
                names = [name.decode() for name in DISTCP_NAME.findall(metadata)]
                if missing := sorted({f"{folder}/{name}" for name in names} - {*hosts}):
                    return f"{show_names(missing)} is missing"
        # transformers: the name model-00001-of-00003.safetensors says that three files exist.
        shards = Counter[tuple[str, int]]()
        for path in (PurePosixPath(file) for file in hosts if file.endswith(ENDINGS_IN_FOLDER)):
            if match := SHARD_NUMBER.search(path.name):
                pattern = str(path.with_name(SHARD_NUMBER.sub("#", path.name)))
                shards[pattern, int(match[1])] += 1
        for (pattern, total), count in shards.items():
            if count < total:
                return f"only {count} of {total} files such as {show_names([pattern])} exist"
        # A rank that was killed has not written its files, such as optim_3.bin. Compare with the
        # next older folder: as many files of each pattern, but one per rank at most.
        counts = count_patterns(name, hosts)
        for older_name in older:
            files = {file.name for files in self.files_of(older_name).values() for file in files}
            is_file = older_name in files
            if is_file or posixpath.dirname(older_name) != posixpath.dirname(name):
                continue
            for pattern, count in count_patterns(older_name, files).items():
                if counts[pattern] < min(count, self.world_size):
                    shown = show_names([pattern])
                    return f"only {counts[pattern]} of {count} files such as {shown} exist"
            break
        return None

    def copy_to_all(self, name: str, by_host: dict[str, list[OutputFile]], free_bytes: int) -> bool:
        """Copy a checkpoint to all machines. Each file is read once, from the first machine whose
        file is intact. Returns whether all machines have it. Raises UserError, Unwritable."""
        sources: dict[str, dict[str, OutputFile]] = {}  # {file: {machine: its file}}
        for host, files in by_host.items():
            for file in files:
                sources.setdefault(file.name, {})[host] = file
            # The pointer (POINTER_NAME) is copied, too: libraries read the checkpoint's name there.
            for file in self.other_files[host]:
                folder, file_name = posixpath.split(file.name)
                is_beside = folder == posixpath.dirname(name) and file.size < TAIL_BYTES
                if is_beside and POINTER_NAME.fullmatch(file_name):
                    sources.setdefault(file.name, {host: file})
        # All files arrive here before any file is sent: no machine gets half of a checkpoint.
        with staging(self.folder) as scratch:
            copies: dict[str, FetchedFile] = {}
            for number, (file_name, files_by_host) in enumerate(sources.items()):
                path = scratch / str(number)
                copy = self.fetch_intact(files_by_host, path, free_bytes, file_name == name)
                if isinstance(copy, str):
                    if copy:
                        self.reject(f"{show_names([name])} did not arrive: {copy}")
                    return False
                copies[file_name] = copy
                free_bytes -= copy.size
            for host in self.run_folders:
                for file_name, copy in copies.items():
                    path, size = copy.path, copy.size
                    if host == copy.host:
                        continue
                    # The pointer may have the checkpoint's path on the machine that wrote it.
                    if file_name != name and POINTER_NAME.fullmatch(posixpath.basename(file_name)):
                        text = self.translate_paths(os.fsdecode(path.read_bytes()), copy.host, host)
                        path = path.with_name(f"{path.name}-for-{host}")
                        size = path.write_bytes(os.fsencode(text))
                    write_file(self.nodes[host], path, size, self.work_folder(host), file_name)
                for source in by_host:
                    self.copy_links(name, source, host)
        return True

    def fetch_intact(
        self, files_by_host: dict[str, OutputFile], path: Path, free_bytes: int, is_single: bool
    ) -> FetchedFile | str:
        """Copy a file from the first machine whose file is intact; `path` with the machine's name
        is the copy's path. Returns the reason if the file did not arrive; "" if no machine's file
        is intact, which is_intact has reported."""
        reason = ""
        for host, file in files_by_host.items():
            if not self.is_intact(host, file, is_single):
                continue
            target = path.with_name(f"{path.name}-{host}")
            try:
                folder = self.work_folder(host)
                size = receive_file(self.nodes[host], folder, file.name, target, free_bytes)
            except NotCopied as error:
                size, reason = None, str(error)
            if size is not None and size <= free_bytes:
                return FetchedFile(host, size, target)
            reason = reason or "it is gone, or the control node's disk is full"
        return reason

    def copy_links(self, name: str, source: str, host: str) -> None:
        """Make on `host` the links to a checkpoint, such as last.ckpt -> step-5.ckpt, that its
        folder on `source` has. Raises UserError."""
        folder = posixpath.dirname(name)
        for link_name, target in self.links[source].items():
            link_folder, base_name = posixpath.split(link_name)
            if not (base_name.endswith(ENDINGS) or NEWEST_NAME.fullmatch(base_name)):
                continue
            # A target from / is a path of the source; another target begins in the link's folder.
            work_folder = self.work_folder(host)
            path = self.translate_paths(target, source, host).removeprefix(f"{work_folder}/")
            path = posixpath.normpath(path if path != target else f"{link_folder}/{target}")
            if host != source and link_folder == folder and path == name:
                make_link(self.nodes[host], work_folder, link_name, posixpath.basename(name))

    def translate_paths(self, text: str, source: str, host: str) -> str:
        """Replace the run's folder of the machine `source` in a text by the folder of `host`."""
        # /home/anna/.tandem/runs/<run>/work/pc1/out/5.pt: above <run> there may be a link, so only
        # the last three folders are compared.
        tail = "/".join(self.work_folder(source).split("/")[-3:])
        pattern = rf"/(?:[^\s\"'/]+/)*{re.escape(tail)}(?=/)"
        return re.sub(pattern, lambda _: self.work_folder(host), text)

    def work_folder(self, host: str) -> str:
        """Return the folder on a machine to which the names of its files belong."""
        return f"{self.run_folders[host]}/{WORK}/{host}"

    def read_piece(self, host: str, name: str, max_bytes: int, begin: int = 0) -> bytes:
        """Return a piece of a machine's file; b"" if it does not arrive. Raises Unwritable."""
        with staging(self.folder) as scratch:
            path = scratch / "piece"
            try:
                folder = self.work_folder(host)
                receive_file(self.nodes[host], folder, name, path, max_bytes, begin)
            except NotCopied:
                return b""
            return path.read_bytes()[:max_bytes] if path.exists() else b""

    def is_intact(self, host: str, file: OutputFile, is_single: bool = True) -> bool:
        """Return whether an attempt can continue from a file, as far as its two ends show.
        `is_single`: the file is the whole checkpoint. Raises Unwritable."""
        head = self.read_piece(host, file.name, HEAD_BYTES)
        # The state of a rank's tandem.sync has no weights, so by itself it is no checkpoint.
        if SYNC_STATE.search(head):
            return not is_single
        problem = None
        if not head and file.name.endswith(ENDINGS):
            problem = "it is empty, or gone"
        # A zip ends with its directory, which torch.save writes last.
        elif head.startswith(ZIP_HEAD):
            tail = self.read_piece(host, file.name, TAIL_BYTES, max(0, file.size - TAIL_BYTES))
            problem = None if ZIP_DIRECTORY_END in tail else "its end is missing"
        # A .safetensors has 8 bytes with the size of its header, the header, and the tensors.
        elif file.name.endswith(SAFETENSORS):
            size = int.from_bytes(head[:8], "little")
            if size > min(MAX_HEADER_BYTES, file.size):
                problem = "its header is damaged"
            else:
                has_header = size <= HEAD_BYTES - 8
                header = head[8:] if has_header else self.read_piece(host, file.name, size, 8)
                ends = map(int, DATA_OFFSETS.findall(header[:size]))
                is_whole = 8 + size + max(ends, default=0) <= file.size
                problem = None if is_whole else "its end is missing"
        if problem:
            self.say(f"{host}: {show_names([file.name])} is skipped: {problem}")
        return problem is None
