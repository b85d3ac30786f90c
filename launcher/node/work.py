"""Copies sent files into the folder in which a program runs, and lists the files that the run wrote
into that folder. The launcher runs `lay_out` and `show_files` on a machine.

A list next to the folder has the hash of each file that was copied. So the list distinguishes sent
files from files of the run, which no sent file may replace.
"""

import json
import os
import pathlib
import shutil
import stat
import urllib.parse

from launcher.node.machine import Pulse, cause_of, file_sha256

PART = ".tandem-part"  # the name of a file while it is written
LISTED_BYTES = 3 << 20  # of the listed files: an answer has at most 4 MiB
FIRST_NAMES = 5  # of files that are otherwise only counted
MOST_LINKS = 100  # links with their targets


def lay_out(mark, sent, work, outputs):
    """Copy the files below `sent` into the folder `work`, and make the folders `outputs` in it.
    Print after the mark the files that the run keeps instead (`kept`), and the error if any."""
    kept_names, problem, work = [], None, pathlib.Path(work)
    try:
        kept_names = update(pathlib.Path(sent), work)
        for output in outputs:  # some scripts do not make the folder into which they save
            (work / output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = cause_of(error)
    print(mark + json.dumps({"kept": count_names(kept_names), "problem": problem}))


def update(sent, work):
    """Copy the files that have changed since the last call. Returns the names of files that are not
    copied, because the run has created or changed them. Raises OSError."""
    laid_out, version = read_list(work), sent.parent.name
    # Another attempt uses the same version, whose files are there already.
    if laid_out["version"] == version and not laid_out["kept"]:
        return []
    work.mkdir(parents=True, exist_ok=True)
    files, kept_names, pulse = laid_out["files"], [], Pulse()
    for source in sorted(path for path in sent.rglob("*") if not path.is_dir()):
        pulse.beat()
        target, name = work / source.relative_to(sent), quote(source.relative_to(sent))
        new_hash, old_hash = file_sha256(source), files.get(name, [None])[0]
        # The sent file is the same as last time. If the target differs, the run has changed it.
        if new_hash == old_hash:
            continue
        # The hash of the target: "" if it is not a readable file, None if nothing is there.
        try:
            is_file = stat.S_ISREG(target.lstat().st_mode)
            target_hash = file_sha256(target) if is_file else ""
        except FileNotFoundError:
            target_hash = None
        except OSError:  # a file is in the place of a folder above, or the target is unreadable
            target_hash = ""
        if target_hash not in (None, old_hash, new_hash):
            kept_names.append(name)
            continue
        if target_hash != new_hash:
            # The target appears completely or not at all. Its owner may always write to it, because
            # the run or a later version may change it.
            target.parent.mkdir(parents=True, exist_ok=True)
            copy, status = target.with_name(PART), source.stat()
            shutil.copyfile(str(source), str(copy))
            copy.chmod(status.st_mode & 0o777 | 0o600)
            os.utime(str(copy), ns=(status.st_atime_ns, status.st_mtime_ns))
            copy.replace(target)
        files[name] = [new_hash, target.stat().st_size, target.stat().st_mtime_ns]
    new_list = work.with_name(work.name + ".part")
    new_list.write_text(json.dumps({"version": version, "files": files, "kept": kept_names}))
    new_list.replace(list_path(work))
    return kept_names


def list_path(work):
    return work.with_name(work.name + ".sent.json")


def read_list(work):
    """Return the list next to this folder: `version` of the sent files, `files` {name: [hash, size,
    time]} of the copies, and the names `kept`."""
    try:
        if work.is_dir():  # otherwise the list is of a folder that somebody has removed
            return json.loads(list_path(work).read_text())
    except (OSError, ValueError):
        pass
    return {"version": "", "files": {}, "kept": []}


def quote(name):
    """Spell any file name in ASCII."""
    return urllib.parse.quote(os.fsencode(name))


def count_names(names):
    """Return the number of names, and the first few of them."""
    return {"count": len(names), "first": sorted(names)[:FIRST_NAMES]}


def show_files(mark, work, folders):
    """Print after the mark: the files that the run wrote into these folders below `work`, the
    newest first; the numbers of other entries by kind; and the targets of links."""
    sent, files, by_kind, pulse = read_list(pathlib.Path(work))["files"], {}, {}, Pulse()
    links = {}
    try:
        os.chdir(work)  # a relative path may lead deeper than the longest absolute path
        pending = list(folders)
    except OSError:  # nothing was sent to this machine yet
        pending = []
    while pending:  # a recursive function would end at a depth of 1,000
        folder = pending.pop()
        try:
            entries = [(entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):  # the script removed it
            continue
        except OSError:
            by_kind.setdefault("unreadable there", set()).add(quote(folder))
            continue
        for entry, status in entries:
            pulse.beat()
            path = entry.name if folder == "." else entry.path
            key = quote(path)
            size_and_time = [status.st_size, status.st_mtime_ns]
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            elif stat.S_ISLNK(status.st_mode):
                by_kind.setdefault("links", set()).add(key)
                if len(links) < MOST_LINKS:
                    target = os.readlink(path)  # noqa: PTH115 (Path.readlink needs Python 3.9)
                    links[key] = quote(target)
            elif not stat.S_ISREG(status.st_mode):
                by_kind.setdefault("not regular files", set()).add(key)
            elif sent.get(key, [])[1:] == size_and_time:  # [hash, size, time]
                by_kind.setdefault("sent", set()).add(key)
            elif entry.name != PART:
                files[key] = size_and_time
    # The answer's size is limited, so only the newest files are listed, and all are counted.
    listed, length = [], 0
    for key in sorted(files, key=lambda key: -files[key][1]):
        length += len(key) + 50
        if length > LISTED_BYTES:
            break
        listed.append([key] + files[key])
    counts = {kind: count_names(names) for kind, names in by_kind.items()}
    answer = {"files": listed, "count": len(files), "others": counts, "links": links}
    print(mark + json.dumps(answer))
