"""Lays out what was sent in the folder that a program runs in, on its machine, and lists what the
run wrote there.

A list next to the folder has the hash of each file that was laid out. It distinguishes the files
that were sent from the files of the run, which nothing that is sent may replace.
"""

import json
import os
import pathlib
import shutil
import stat
import urllib.parse

from launcher.node.machine import Pulse, cause_of, file_sha256

PART = ".tandem-part"  # a file that is being written
LISTED_BYTES = 3 << 20  # an answer has 4 MiB at most
FIRST_NAMES = 5  # that are listed for people, where names are only counted
MOST_LINKS = 100  # whose targets are listed


def lay_out(mark, sent, work, outputs):
    """Bring the files below `sent` into the folder `work`, make the folders `outputs` there, and
    print after the mark which files the run keeps instead, and what went wrong."""
    kept_names, problem, work = [], None, pathlib.Path(work)
    try:
        kept_names = update(pathlib.Path(sent), work)
        for output in outputs:  # not every script makes the folder that it saves in
            (work / output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = cause_of(error)
    print(mark + json.dumps({"kept": count_names(kept_names), "problem": problem}))


def update(sent, work):
    """Write the files that have changed since they were last laid out; return the names of those
    that the run has created or changed, and keeps. Raises OSError."""
    laid_out, version = read_list(work), sent.parent.name
    # The same version again, as in another attempt.
    if laid_out["version"] == version and not laid_out["kept"]:
        return []
    work.mkdir(parents=True, exist_ok=True)
    files, kept_names, pulse = laid_out["files"], [], Pulse()
    for source in sorted(path for path in sent.rglob("*") if not path.is_dir()):
        pulse.beat()
        target, name = work / source.relative_to(sent), quote(source.relative_to(sent))
        new_hash, old_hash = file_sha256(source), files.get(name, [None])[0]
        # What was sent has not changed. If the target differs, the run has changed or removed it.
        if new_hash == old_hash:
            continue
        # The hash of what is at the target: "" for what is no file that can be read.
        try:
            is_file = stat.S_ISREG(target.lstat().st_mode)
            target_hash = file_sha256(target) if is_file else ""
        except FileNotFoundError:
            target_hash = None
        except OSError:  # a file has the name of one of its folders, or nobody may read it
            target_hash = ""
        if target_hash not in (None, old_hash, new_hash):
            kept_names.append(name)
            continue
        if target_hash != new_hash:
            # Whole or not at all, and with its time. Its owner may write to it, whatever the
            # original allows, since the run or a later version may change it.
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
    """Return what was laid out in this folder: `files` has the hash, size and time of each."""
    try:
        if work.is_dir():  # otherwise somebody has removed it, and everything is new
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
    """Print after the mark the files that the run wrote into these folders below `work`, the newest
    first, how many there are of everything else, by its kind, and where links lead."""
    sent, files, by_kind, pulse = read_list(pathlib.Path(work))["files"], {}, {}, Pulse()
    links = {}
    try:
        os.chdir(work)  # relative paths may be longer than absolute ones
        pending = list(folders)
    except OSError:  # nothing was sent to this machine yet
        pending = []
    while pending:  # a walk that calls itself would end at a depth of 1,000
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
            elif sent.get(key, [])[1:] == size_and_time:
                by_kind.setdefault("sent", set()).add(key)
            elif entry.name != PART:
                files[key] = size_and_time
    # The answer has a limit: the newest files are listed, and all are counted.
    listed, length = [], 0
    for key in sorted(files, key=lambda key: -files[key][1]):
        length += len(key) + 50
        if length > LISTED_BYTES:
            break
        listed.append([key] + files[key])
    counts = {kind: count_names(names) for kind, names in by_kind.items()}
    answer = {"files": listed, "count": len(files), "others": counts, "links": links}
    print(mark + json.dumps(answer))
