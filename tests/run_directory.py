"""docs/run-directory.md as code: which fields each file has, and of which type.

`problems(folder)` is for tests of every room that end with a run directory.
"""

import json
import re
from pathlib import Path

from contract.records import CATEGORIES, SUM_COUNTERS

NUMBER, NULL = (int, float), type(None)
MAYBE = (*NUMBER, NULL)
TEXT = (str, NULL)

FILES = {
    "plan.json": {
        "run": str, "created_unix": NUMBER, "tandem": str, "data": str,
        "program": dict, "measured": (dict, NULL), "check": list, "sent": list,
        "world_size": int,
        "master_addr": str, "master_port": int,
        "code_sha256": str, "git_revision": TEXT, "git_diff": str, "nodes": list,
    },
    "plan.json nodes": {
        "host": str, "node_rank": int, "ranks": list, "connection": str, "address": TEXT,
        "port": (int, NULL), "user": TEXT, "interface": TEXT, "argv": list, "env": dict, "cwd": str,
        "output": str, "versions": dict,
    },
    "attempts.json": {"status": str, "attempts": list},
    "attempts.json attempts": {
        "attempt": int, "nodes": list, "ranks": dict, "world_size": int, "decided": (dict, NULL),
        "code_sha256": str, "master_port": int,
        "started_unix": NUMBER, "wall_seconds": MAYBE, "reason": str, "status": str,
        "resumed_samples": MAYBE, "first_cause": (dict, NULL), "to_resume": TEXT,
        "went_on_from": TEXT, "silent_ranks": list,
    },
    "attempts.json first_cause": {
        "host": TEXT, "rank": (int, NULL), "exit_code": (int, NULL), "signal": (str, int, NULL),
        "exception": TEXT, "message": str, "remedy": TEXT, "last_lines": list,
    },
    "summary.json": {
        "version": int, "status": str, "nodes": int, "world_size": int, "attempts": list,
        "first_cause": (dict, NULL), "best_top1": MAYBE, "final_top1": MAYBE, "epochs": int,
        "steps": int, "images_per_second": MAYBE, "wall_seconds": NUMBER, "seconds": dict,
        "bytes_sent_per_step": MAYBE, "sync": TEXT, "bottleneck": str, "advice": list,
        "bottleneck_fraction": MAYBE, "runner_up": (dict, NULL), "undecided": (dict, NULL),
        "coverage": (dict, NULL),
        "predicted": (dict, NULL), "tried": (dict, NULL),
        "gpu_joules": MAYBE, "gpu_joules_per_image": MAYBE,
    },
}  # fmt: skip

LINES = {
    "start": {
        "record": int, "attempt": int,
        "mono_process": NUMBER, "mono": NUMBER, "unix": NUMBER, "host": str, "rank": int,
        "local_rank": int, "node_rank": int, "world_size": int, "pid": int, "python": str,
        "torch": str, "device": str, "model": str, "parameters": int, "gradient_bytes": int,
        "bucket_mb": NUMBER,
        "flops_per_image": MAYBE, "global_batch": int, "rank_batch": int, "accumulate": int,
        "train_images": int, "eval_images": int, "epochs": int, "steps_per_epoch": int,
        "warmup": NUMBER,
        "precision": str, "sync": str, "image_size": int, "resumed_samples": int,
        "instructions": dict, "versions": dict, "cpu": str, "cores": int, "options": dict,
        "workers": int, "decided": dict,
    },
    "step": {
        "step": int, "steps": int, "epoch": int, "samples": int, "seconds": dict,
        "longest": NUMBER,
    },
    "evaluate": {
        "epoch": int, "samples": int, "top1": NUMBER, "top5": NUMBER, "loss": MAYBE,
        "train_loss": MAYBE, "train_top1": NUMBER, "seconds": dict,
    },
    "checkpoint": {"step": int, "seconds": dict, "bytes": int, "file": str},
    "stall": {"category": str, "step": int, "idle": NUMBER},
    "end": {
        "mono": NUMBER, "seconds": dict, "status": str, "peak_memory_bytes": MAYBE,
        "bad_images": int,
    },
}  # fmt: skip

MACHINE = {
    "sample": {
        "mono": NUMBER, "unix": NUMBER, "cores": int, "cpu_busy": NUMBER, "cpu_iowait": NUMBER,
        "cpu_steal": NUMBER, "memory_total": int, "memory_available": int, "swap_total": int,
        "swap_free": int, "swapped_in": int, "swapped_out": int,
    },
    "exit": {
        "mono_start": NUMBER, "mono_end": NUMBER, "exit_code": (int, NULL), "signal": TEXT,
        "workers": dict, "peak_memory_bytes": dict,
    },
    "stacks": {"mono": NUMBER, "unix": NUMBER, "ranks": dict},
}  # fmt: skip
# What a machine does not say is absent.
WHERE_KNOWN = {
    "pressure_cpu": NUMBER, "pressure_memory": NUMBER, "pressure_io": NUMBER, "temperature": NUMBER,
    "disk_free": int, "ranks": dict, "card": dict, "disks": dict, "data_disk": str,
    "mounts": dict, "gpus": list, "alone": list, "only_received": int, "finished": list,
}  # fmt: skip
# Of each rank, card, peer, disk, mount and GPU.
SILENT_RANK = {"last": NUMBER, "state": str, "threads": list}
OF_SOME = {"wait": str, "sums": dict}  # of silent ranks
SUMS = dict.fromkeys(SUM_COUNTERS, int)
PARTS = {
    "ranks": {
        **dict.fromkeys(("ran", "waited", "loaders", "loaders_busy"), NUMBER),
        "state": str,
    },
    "card": {
        "interface": str, "rx_bytes": int, "tx_bytes": int, "rx_dropped": int, "tx_dropped": int,
        "tcp_retransmits": int,
    },
    "peers": {"from": str, "sent": int, "busy": NUMBER},
    "disks": dict.fromkeys(
        ("r/s", "w/s", "rkB/s", "wkB/s", "r_await", "w_await", "aqu-sz", "util"), NUMBER
    ),
    "mounts": {"type": str, "read_bytes": int},
    "gpus": {
        "index": int, "mono": NUMBER, "utilization": MAYBE, "memory_used": MAYBE,
        "temperature": MAYBE, "power": MAYBE, "clock_sm": MAYBE,
    },
}  # fmt: skip


# Of a script of one's own nobody knows these, or not of each.
TRAINERS = {
    "flops_per_image", "eval_images", "epochs", "warmup", "options", "train_images",
    "steps_per_epoch", "bucket_mb", "decided", "bad_images",
}  # fmt: skip


def problems(folder):
    """Sentences about what in a run directory breaks the contract; [] if nothing does."""
    folder = Path(folder)
    found = []
    plan = folder / "plan.json"
    program = json.loads(plan.read_text())["program"] if plan.exists() else {}
    own_script = not program.get("times_steps", True)
    for name in ("plan.json", "attempts.json", "summary.json"):
        if (folder / name).exists():
            found += document(folder / name)
    for path in sorted((folder / "nodes").glob("*/*")):
        if path.suffix == ".jsonl":
            found += json_lines(path, own_script)
        elif path.suffix == ".json" and path.name != "links.json":
            found.append(f"{path} is no file of a run")
    return found


def document(path):
    """Problems of a JSON file and of the lists and causes in it."""
    value = json.loads(path.read_text())
    found = check(FILES[path.name], value, str(path))
    for key in ("nodes", "attempts"):
        schema = FILES.get(f"{path.name} {key}")
        for entry in value.get(key, []) if schema else []:
            found += check(schema, entry, f"{path} {key}")
            if path.name == "attempts.json" and entry.get("first_cause"):
                cause = entry["first_cause"]
                found += check(FILES["attempts.json first_cause"], cause, f"{path} first_cause")
    if path.name == "summary.json" and set(value["seconds"]) != set(CATEGORIES):
        found.append(f"{path}: seconds has {sorted(value['seconds'])}")
    return found


RECORD = re.compile(r"(machine|rank\d+)\.(\d+)(\.steps)?\.jsonl")


def json_lines(path, own_script=False):
    """Problems of a JSON Lines file; its last line may be half."""
    match = RECORD.fullmatch(path.name)
    if not match or (match[1] == "machine") == bool(match[3]):
        return [f"{path} is no file of a run"]
    found, kinds = [], []
    texts = path.read_text().splitlines()
    for index, text in enumerate(texts):
        where = f"{path}:{index + 1}"
        try:
            line = json.loads(text)
        except ValueError:
            if index < len(texts) - 1:
                found.append(f"{where}: does not parse")
            continue
        kinds.append(line.get("kind"))
        if match[3]:
            found += rank_line(line, where, own_script)
            if line.get("attempt", int(match[2])) != int(match[2]):
                found.append(f"{where}: of attempt {line['attempt']}")
        else:
            found += machine_line(line, where)
    last = "end" if match[3] else "exit"
    if last in kinds[:-1]:
        found.append(f"{path}: {last} is not its last line")
    return found


def rank_line(line, where, own_script=False):
    schema = {"kind": str, **LINES.get(line.get("kind"), {"kind": NULL})}
    if own_script:
        schema = {n: kind for n, kind in schema.items() if n not in TRAINERS or n in line}
    strange = set(line.get("seconds") or {}) - set(CATEGORIES)
    return check(schema, line, where) + [f"{where}: no category {one}" for one in sorted(strange)]


def machine_line(line, where):
    found = check({"kind": str, **MACHINE.get(line.get("kind"), {"kind": NULL})}, line, where)
    if line.get("kind") == "stacks":
        for rank in line.get("ranks", {}).values():
            some = {name: kind for name, kind in OF_SOME.items() if name in rank}
            found += check({**SILENT_RANK, **some}, rank, where)
            found += check(SUMS, rank["sums"], where) if "sums" in rank else []
        return found
    if line.get("kind") != "sample":
        return found
    found += check({n: kind for n, kind in WHERE_KNOWN.items() if n in line}, line, where)
    strange = line.keys() - {"kind"} - MACHINE["sample"].keys() - WHERE_KNOWN.keys()
    found += [f"{where}: nobody wrote down {name}" for name in sorted(strange)]
    card = line.get("card")
    parts = {name: line[name] for name in PARTS.keys() & line.keys()}
    if card:
        parts |= {"card": [card], "peers": card.get("peers", {})}
    for name, every in parts.items():
        for one in every.values() if isinstance(every, dict) else every:
            # A rank that ends before its first sample has no times.
            is_new = name == "ranks" and "ran" not in one
            schema = {"state": str} if is_new else PARTS[name]
            found += check(schema, one, f"{where} {name}")
    return found


def check(schema, value, where):
    """Fields of `value` that are absent or of another type."""
    found = []
    for name, kinds in schema.items():
        if name not in value:
            found.append(f"{where}: {name} is missing")
        elif not isinstance(value[name], kinds) or isinstance(value[name], bool) > (kinds is bool):
            found.append(f"{where}: {name} is {value[name]!r}")
    return found


def documented(page):
    """Section title -> the names that the section has in quotes or backticks."""
    sections = re.split(r"^##+ ", page, flags=re.M)[1:]
    return {
        section.splitlines()[0]: set(re.findall(r'["`](\w+)["`]', section)) for section in sections
    }
