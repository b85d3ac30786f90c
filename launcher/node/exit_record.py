"""How a node's part of an attempt ended: exit.json, and which processes were left."""

import time

from launcher.node.disks import read_attempts, write_json
from launcher.node.processes import decode_status


def entry(mono_start, launch_status, workers):
    """An attempt in exit.json (without its number) and in the exit frame; launch_status or None."""
    code, name = decode_status(launch_status) if launch_status is not None else (None, None)
    return {
        "mono_start": mono_start,
        "mono_end": time.monotonic(),
        "exit_code": code,
        "signal": name,
        "workers": {str(worker.rank): worker.outcome() for worker in workers},
    }


def write(folder, task, fresh, peaks):
    """Add an entry to exit.json, where there is a folder for it; `peaks` is the memory that each
    worker had at most. Raises OSError."""
    if folder is None or not folder.is_dir():
        return
    path = folder / "exit.json"
    others = [old for old in read_attempts(path) if old.get("attempt") != task.attempt]
    mine = dict({"attempt": task.attempt}, **fresh, peak_memory_bytes=peaks)
    write_json(path, {"host": task.host, "attempts": [*others, mine]})


NAMED = 400  # processes listed with their command: a frame has 1 MiB at most


def leftovers(ended, left):
    """The processes that were ended (commands by pid), and those that could not be."""

    def listed(pids):
        commands = [ended[pid] if place < NAMED else "" for place, pid in enumerate(sorted(pids))]
        return [{"pid": pid, "command": command} for pid, command in zip(sorted(pids), commands)]

    return {"ended": listed(ended), "left": listed(left)}
