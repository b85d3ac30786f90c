"""What of each reader of outside values the fuzzers reach: `python -m tests.readers`.

A reader is what turns bytes or values that a machine, a file or a user gives into values that the
rest trusts. All tests that hypothesis generates run with branch coverage; the table has the lines
and branches of each reader, and every one that was not reached is printed. Those in UNREACHED are
explained there; any other ends it with exit code 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.fuzz import WHOLE

ROOT = Path(__file__).parents[1]
# What is read, and the functions that read it: patterns of names in a file.
READERS = {
    "frames": {
        "contract/validate.py": ("*",),
        "launcher/watch/guards.py": ("Frames.*", "shapes"),
        "launcher/watch/lines.py": ("_pieces", "_short", "RankLog.feed", "RankLog._lines"),
    },
    "facts": {
        "launcher/machines/probe.py": ("read_facts", "shape", "_read_pairs"),
        "launcher/machines/engines/ssh.py": ("read_known_hosts", "KnownHost.means", "_like"),
        "ansible/planning/border.py": ("*",),
        "ansible/planning/network_netplan.py": ("_read", "_look_at", "_mapping", "_items"),
        "ansible/planning/wake.py": ("wake_fault", "wake_verdict", "wake_record"),
        "ansible/planning/health.py": ("health", "_dict", "_text", "_number", "_counts", "_gpus"),
    },
    "records": {
        "report/files.py": ("*",),
        "report/read.py": ("*",),
        "report/older.py": ("*",),
        "report/status.py": (
            *("sample_of", "rates_of", "figures", "queued", "oversubscription"),
            *("machines_of", "troubles", "most"),
        ),
        "launcher/watch/records.py": ("*",),
        "launcher/watch/attempts.py": ("lines_of",),
    },
    "checkpoints": {
        "trainer/snapshots.py": ("*",),
        "trainer/checkpoint.py": ("restore", "load*", "_refuse_compressed", "complete", "read_*"),
        "trainer/resume.py": ("_newest_here", "_allowed_here", "_own_files", "restore_own"),
        "trainer/optim.py": ("load_state", "_sizes", "_kept", "_steps", "_odd_state"),
        "trainer/writer.py": ("is_whole",),
        "tandem/compat.py": ("is_plain", "load_tensors"),
        "trainer/ema.py": ("Ema.load_state_dict",),
        "tandem/sync/feedback.py": ("Feedback.load_state_dict", "kept_tensor"),
    },
    "plans": {
        "launcher/folders.py": ("recorded",),
        "launcher/run.py": ("resume",),
        "launcher/watch/attempts.py": ("Attempts.__init__", "Attempts.close_broken"),
        "contract/runs.py": ("read_prediction", "holds", "is_fresh"),
    },
    "inventories": {
        "launcher/machines/inventory.py": ("parse", "members", "Variables.*", "_host*", "numeric"),
        "launcher/machines/owned.py": ("read", "hours", "_[a-z]*"),
        "ansible/bootstrap.py": ("machine_of",),
        "contract/machines.py": ("*",),
    },
    "outputs": {
        "launcher/collect.py": ("receive", "_content", "checkpoints", "newest", "cut_to_lines"),
        "launcher/outputs.py": ("listing", "_listed", "_read"),
        "launcher/checkpoints.py": ("held_by", "_checkpoints", "_[pbnlws][a-z]*", "flaw", "_piece"),
        "launcher/pickles.py": ("*",),
    },
    "owners": {
        "launcher/owners.py": ("_ask",),
        "launcher/node/owner.py": ("sessions", "is_at_seat", "busy_cards"),
        "ansible/roles/owner/files/tandem.py": ("owner", "files", "own_files", "said_no", "runs"),
    },
    "queue": {
        "launcher/node/tickets.py": ("Queue.tickets", "Queue._ticket", "Queue._read"),
        "launcher/queue.py": ("_ask",),
    },
    "top": {"launcher/top.py": ("Idle.*", "tail", "fitting")},
    "links": {"launcher/node/pairprobe.py": ("take_line", "parse", "Door.*")},
    "scripts": {
        "launcher/plan/code.py": ("loaded_by", "_holds", "parsed", "_imported"),
        "launcher/plan/models.py": ("_function", "_words", "_defined"),
        "launcher/plan/requirements.py": ("*",),
        "launcher/plan/layer.py": ("_kept", "canonical", "Environment.of", "Layer.differs"),
    },
    "sweeps": {
        "tools/sweep.py": ("read", "adopted", "run_of", "attempts_of", "why"),
        "report/comparing.py": ("read_cells", "read_cell"),
    },
    "foreign runs": {
        "launcher/control.py": ("controller", "elsewhere", "read", "state", "runs", "_show"),
        "launcher/status.py": ("last_lines", "attempts"),
    },
    "verbs": {
        "tools/verbs.py": ("check", "options"),
        "contract/options.py": ("Option.read", "Option._number", "path_of"),
        "contract/verbs.py": ("refusal_of", "did_you_mean"),
    },
    "recipes": {
        "contract/command_line.py": ("parse", "*_words", "read_config", "_loaded", "_u*"),
        "contract/text.py": ("read_text", "read_yaml"),
    },
    "data sets": {
        "contract/layout.py": ("*",),
        "trainer/data/folder.py": ("ImageFolder.__init__", "ImageFolder.natural_size"),
        "trainer/data/decode.py": ("read_image", "size_of", "_*"),
        "launcher/machines/probes/machine.py": ("data", "others", "splits", "listing", "size"),
    },
    "facts files": {
        "ansible/dry_provision.py": ("read", "_is_entry"),
        "ansible/wake.py": ("record", "records"),
        "ansible/planning/stacks.py": ("kept",),
    },
}
# Other modules that open files, receive bytes or read folders, by what these are: nothing that
# another machine or user gives. Any other is a reader (test_architecture.py).
KINDS = {
    "the checkout's own files": """
        ansible/bundling/debs.py ansible/bundling/table.py ansible/planning/offline.py
        ansible/stacks_page.py contract/prices.py launcher/plan/devices.py
        tandem/standalone.py tools/rings.py""",
    "the kernel's files": """
        contract/card.py launcher/node/processes.py launcher/node/records.py
        launcher/node/sockets.py tandem/timings.py""",
    "files that are copied or hashed, and not taken apart": """
        launcher/node/machine.py launcher/node/prepare.py""",
    "what it has written itself, or its like": """
        ansible/bundle.py ansible/bundling/wheels.py ansible/check.py launcher/background.py
        launcher/waits.py
        launcher/cli.py launcher/node/supervisor.py report/__main__.py report/cli.py
        report/events.py report/measurements.py trainer/export.py
        ansible/roles/cuda/files/relocate.py""",
    "what the control machine sends to its own programs": """
        launcher/node/link.py launcher/node/slurm.py trainer/models.py
        ansible/planning/network.py ansible/module_utils/commands.py""",
    "what a machine finds on itself, which is checked here (border.py)": """
        ansible/library/driver_facts.py ansible/library/health_facts.py
        ansible/library/machine_facts.py ansible/module_utils/kernels.py
        ansible/roles/accept/files/diskprobe.py""",
    "a method of that name, of no file": """
        launcher/machines/engine.py launcher/measure.py launcher/plan/checks.py launcher/slurm.py
        launcher/watch/watch.py""",
    "members, who trust each other (docs/security.md)": "tandem/exchange.py trainer/world.py",
    "a stick, which is trusted (docs/security.md)": "ansible/bundling/manifest.py",
    "archives, by their sums": """
        ansible/bundling/fetch.py ansible/library/toolkit_archive.py tools/imagenet.py""",
    "greetings of 255 bytes at most, by a pattern: test_find.py": "launcher/find.py",
    "names of sockets: test_guard_machine_lock.py": "launcher/node/machine_lock.py",
}
OWN = {file: why for why, files in KINDS.items() for file in files.split()}
# Why no fuzzer reaches it: the beginning of a line, by its file.
UNREACHED = {
    ("tandem/compat.py", 'if "weights_only"'): "torch 1.12, by test_pickles.py",
    ("tandem/compat.py", 'return torch.load(file, map_location="cpu", pickle'): "the same",
    ("tandem/sync/feedback.py", "if not isinstance(state, dict)"): "a script's: test_attach.py",
    ("tandem/sync/feedback.py", 'raise ValueError("no dict")'): "the same",
    ("trainer/resume.py", "if wanted is None"): "no option to resume",
    ("trainer/resume.py", "return"): "no option to resume",
    ("trainer/resume.py", "if best[1] is None"): "several files, by test_train_resume.py",
    ("trainer/resume.py", "if job.sync is None"): "a strategy that keeps nothing",
    ("launcher/run.py", ""): "what comes after both files were read: test_run.py",
    ("launcher/folders.py", 'why = "it is missing"'): "test_resume_files.py",
    ("launcher/watch/attempts.py", "if self.path.exists()"): "a run that is new",
    ("launcher/watch/lines.py", ""): "a terminal, by test_lines.py",
    ("launcher/machines/inventory.py", "for child"): "a group of groups, by Ansible's own document",
    ("launcher/machines/inventory.py", "names += members"): "the same",
    ("contract/command_line.py", "except ImportError"): "a Python without PyYAML",
    ("contract/command_line.py", 'raise UserError(f"--config {path}: reading'): "the same",
    ("contract/layout.py", "if error.errno in FAILING"): "a disk that fails: test_data_lost.py",
    ("contract/layout.py", "raise NoAnswer("): "the same",
    ("contract/layout.py", "raise LayoutError("): "a closed folder: test_data_folder.py",
    ("contract/layout.py", "raise error"): "the same",
    ("report/read.py", "if not folder.is_dir()"): "no run at all: test_summary.py",
    ("report/read.py", 'raise UserError(f"There is no run'): "the same",
    ("report/read.py", "except (UserError"): "limits of the report's own: test_odd_files.py",
    ("report/read.py", "raise"): "the same",
    ("report/read.py", "except Exception"): "what nobody foresaw: test_read.py",
    ("report/read.py", "kind = type(error)"): "the same",
    ("report/read.py", "self._faults[host] ="): "the same",
    ("report/older.py", "for _ in range(MOST_ATTEMPTS)"): "a thousand attempts",
    ("report/read.py", "if len(record.beside)"): "thousands of lines: test_odd_files.py",
    ("launcher/watch/records.py", "if whole == offset and"): "a disk that is full: test_records.py",
    ("launcher/watch/records.py", "os.ftruncate("): "a disk that is full: test_records.py",
    ("launcher/watch/records.py", "if copy.cost >"): "seconds of pieces: test_records.py",
    ("launcher/watch/records.py", 'raise Invalid(f"more of'): "the same",
    ("launcher/node/tickets.py", ""): "names, pipes, what is taken back: test_queue.py",
    ("launcher/queue.py", ""): "asking the machines: test_queue.py",
    ("launcher/control.py", "if waits.of("): "what waits: test_waits.py",
    ("launcher/control.py", 'return "waits"'): "the same",
    ("launcher/control.py", "for wait in waits"): "the same",
    ("launcher/control.py", "say(wait.sentence())"): "the same",
    ("launcher/control.py", "if own := waits.of("): "the same",
    ("launcher/control.py", 'say(f"  {own.sentence()}")'): "the same",
    ("ansible/roles/owner/files/tandem.py", ""): "gone, missing, many: test_owner_command.py",
    ("launcher/node/pairprobe.py", "except OSError:  # it"): "who left: no test can say when",
    ("launcher/node/pairprobe.py", "return"): "the same",
    ("trainer/checkpoint.py", "raise"): "a disk that fails",
    ("trainer/checkpoint.py", 'raise UserError(f"{name}: cannot'): "the same",
    ("trainer/data/decode.py", "if error.errno not in"): "a file that is gone: test_data_lost.py",
    ("trainer/data/decode.py", "raise BadImage(reason)"): "the same",
    ("trainer/data/decode.py", "except Exception:  # damaged EXIF"): "Pillow warns of it by now",
    ("trainer/data/decode.py", "return None"): "the same",
}


def covered(tests: list[str]) -> dict[str, Any]:
    """coverage's document on the modules of READERS after all fuzzers have run."""
    python = [sys.executable, "-m"]
    files = sorted({file for modules in READERS.values() for file in modules})
    with tempfile.TemporaryDirectory() as folder:
        data = [f"--data-file={folder}/data"]
        run = ["coverage", "run", "--branch", *data, f"--include={','.join(files)}", "-m", "pytest"]
        argv, env = [*python, *run, "-q", "-m", "hypothesis", *tests], os.environ | {WHOLE: "1"}
        subprocess.run(argv, cwd=ROOT, check=True, env=env)
        out = f"{folder}/found.json"
        subprocess.run([*python, "coverage", "json", "-q", *data, "-o", out], cwd=ROOT, check=True)
        return dict(json.loads(Path(out).read_text())["files"])


def functions(found: dict[str, Any], modules: dict[str, tuple[str, ...]]) -> list[tuple[str, Any]]:
    """(file, coverage's entry) of each function of a reader. Raises KeyError for one that is gone
    or has another name."""
    every = []
    for file, patterns in modules.items():
        named = found[file]["functions"]
        for pattern in patterns:
            matching = [name for name in named if name and fnmatchcase(name, pattern)]
            if not matching:
                raise KeyError(f"{file} has no function {pattern}")
            every += [(file, named[name]) for name in matching]
    return every


def missed(file: str, entry: dict[str, Any]) -> list[tuple[int, str]]:
    """Number and text of each line that was not reached, or that never went on to another one."""
    text = Path(ROOT / file).read_text().splitlines()
    numbers = {*entry["missing_lines"], *(abs(at) for at, _ in entry["missing_branches"])}
    return [(number, text[number - 1].strip()) for number in sorted(numbers)]


def reason(file: str, line: str) -> str | None:
    known = (
        why
        for (where, begin), why in UNREACHED.items()
        if where == file and line[: len(begin)] == begin
    )
    return next(known, None)


def main(tests: list[str]) -> int:
    found = covered(tests)
    print(f"\n{'reader':<12} {'functions':>9} {'lines':>11} {'branches':>11}")
    left = []
    for what, modules in READERS.items():
        rows = functions(found, modules)
        total = {key: sum(entry["summary"][key] for _, entry in rows) for key in ROWS}
        lines = f"{total['covered_lines']}/{total['num_statements']}"
        branches = f"{total['covered_branches']}/{total['num_branches']}"
        print(f"{what:<12} {len(rows):>9} {lines:>11} {branches:>11}")
        left += [(file, *line) for file, entry in rows for line in missed(file, entry)]
    for file, number, line in left:
        print(f"  {file}:{number}: {line[:60]}: {reason(file, line) or 'NOT REACHED'}")
    return int(any(reason(file, line) is None for file, _, line in left))


ROWS = ("covered_lines", "num_statements", "covered_branches", "num_branches")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["tests/unit"]))
