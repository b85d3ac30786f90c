"""The rings of tests: `make test` (anybody, in minutes), `make test-lab` (root: machines of the
lab), `make test-all` (all the rest, in pieces).

Each ring is a list of parts, each a command. `test` and `test-lab` stop at the first part that
fails. `test-all` goes on, keeps what it printed and how it ended in .tandem/test-all/, and leaves
out what passed there before: broken off, it goes on where it was; AGAIN=1 begins anew.

Standard library only, Python >= 3.11: it runs before there is an environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from contract import git
from contract.command_line import verb_words
from contract.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ".venv/bin/python"
OTHER_CORE = ".venv-core2.16"
RESULTS = ROOT / ".tandem/test-all"
CI = os.environ.get("CI") == "true"
# Two cores: beside a third process, since some tests wait for guards or ranks.
BUSY = f"--numprocesses={(os.cpu_count() or 1) + 1}"
# Where the disk has less room, the lab's files go in two calls: beside the CUDA 10.2 stack, whose
# environment takes several GB, those that need none of their own.
ROOMY = 40 << 30  # bytes
BESIDE_LEGACY = (
    *("site_check", "site_driver", "site_firewall", "site_network", "site_trust"),
    *("chaos", "control", "lab_faults", "lab_machines"),
)
# What `make test` needs of Debian, by a command of each package (tools/test-packages.txt).
COMMANDS = {"ssh": "openssh-client", "rsync": "rsync", "iostat": "sysstat", "chromium": "chromium"}


@dataclass(frozen=True)
class Part:
    """One command of a ring. `setup`: what it makes stays, so that the next time it takes nothing.
    `spares`: what no later part needs is removed where CI is true, whose disk is small."""

    name: str
    argv: tuple[str, ...]
    setup: bool = False
    spares: tuple[str, ...] = ()
    beside: Part | None = None  # runs at the same time, where this one leaves a core idle
    env: dict[str, str] = field(default_factory=dict)


def pytest(name: str, *words: str, **options: object) -> Part:
    argv = (PYTHON, "-m", "pytest", "--quiet", "--durations=15", "--durations-min=2", *words)
    return Part(name, argv, **options)  # type: ignore[arg-type]


def setup(*packages: str) -> list[Part]:
    parts = [
        Part("environment", ("tools/venv.sh", "dev"), setup=True),
        Part("data", (PYTHON, "examples/digits.py", "data/digits"), setup=True),
    ]
    if os.geteuid() == 0:
        return [Part("Debian packages", ("tools/apt.sh", *packages), setup=True), *parts]
    missing = sorted(name for command, name in COMMANDS.items() if not shutil.which(command))
    if missing:
        raise UserError(f"the tests need: sudo apt install {' '.join(missing)}")
    return parts


def ring_test(only: str) -> list[Part]:
    parts = setup("tools/test-packages.txt")
    short = ("-m", "not long")
    if only:
        options = ["--device=cpu"] if "tests/gpu" in only else []
        return [*parts, pytest(only, *short, *options, *paths(only))]
    # Most of lint is one process of ansible-lint.
    gpus = pytest("what GPUs are to do, on the CPU", "-m", "quick", "--device=cpu", "tests/gpu")
    # worksteal: neighbours stay in one process, so that fixtures that they share are made once.
    return [
        *parts,
        Part("lint", ("tools/lint.sh",), beside=gpus),
        pytest("unit tests", *short, BUSY, "--dist=worksteal", "tests/unit", "tests/messages"),
        pytest("training", *short, "--numprocesses=2", "--dist=loadscope", "tests/train"),
    ]


def ring_lab(only: str) -> list[Part]:
    """Machines boot, and are provisioned, within one test, so that a test may take an hour."""
    needs_root("the lab boots machines")
    parts = setup("tools/test-packages.txt", "lab/packages.txt")
    long = ("-o", "faulthandler_timeout=3600", "-m", "not long")
    if only:
        return [*parts, pytest(only, *long, *paths(only, "lab"))]
    legacy = "tests/lab/test_legacy.py"
    beside = [f"tests/lab/test_{name}.py" for name in BESIDE_LEGACY]
    # They mostly wait for machines, so three processes share them, the longest first;
    # tests/lab/conftest.py says which files go together.
    three, order = (*long, "--numprocesses=3"), "--no-loadscope-reorder"
    first = ["tests/lab/test_site.py", legacy, *beside]
    ansibles = Part("both Ansibles", ("tools/cores.sh",), spares=("runs", ".tandem", OTHER_CORE))
    if shutil.disk_usage(ROOT).free >= ROOMY:
        others = [name for name in files("tests/lab") if name not in first]
        return [*parts, ansibles, pytest("the lab", *three, order, *first, *others)]
    rest = [f"--ignore={name}" for name in (legacy, *beside)]
    last = ("runs", ".tandem", "bundle/wheels/cu102-*", "/var/cache/tandem-lab/envs/bullseye")
    return [
        *parts,
        ansibles,
        pytest("the lab with the CUDA 10.2 stack", *three, order, legacy, *beside, spares=last),
        pytest("the lab", *three, *rest, "tests/lab"),
    ]


def ring_all(only: str) -> list[Part]:
    """A part for each file with tests that are marked long, and what else takes long."""
    needs_root("most of these tests boot machines")
    for part in setup("tools/test-packages.txt", "lab/packages.txt"):
        run(part)
    hour = ("-o", "faulthandler_timeout=3600")
    long = collect("-m", "long", "tests/unit", "tests/train", "tests/lab")
    parts = [pytest(file, "-m", "long", *hour, file) for file in long]
    parts += [pytest(file, *hour, file) for file in files("bench")]
    ours, forty = {"PYTHON": PYTHON}, {"TANDEM_CHAOS_TRIALS": "40"}
    parts += [
        pytest("40 faults", *hour, "tests/lab/test_chaos.py", env=forty),
        pytest("fuzzers", "-m", "hypothesis", "tests/unit", env={"TANDEM_FUZZ": "1"}),
        Part("test-gpu on the CPU", ("tools/test-gpu.sh", "--device=cpu"), env=ours),
        pytest("40 verdicts", *hour, "bench/verdict"),
    ]
    return [part for part in parts if only in part.name]


RINGS = {"test": ring_test, "test-lab": ring_lab, "test-all": ring_all}


def needs_root(why: str) -> None:
    if os.geteuid():
        raise UserError(f"{why}, which needs root: sudo make {{verb}}")


def paths(only: str, room: str = "unit") -> list[str]:
    """ONLY=launcher, ONLY=train, ONLY=tests/unit/x.py::test_y; with spaces between, several."""
    tests = []
    for word in only.split():
        places = (word, f"tests/{room}/{word}", f"tests/{word}")
        exists = [place for place in places if (ROOT / place.partition("::")[0]).exists()]
        exists = [place for place in exists if place.startswith("tests/")]
        if not exists:
            rooms = sorted(path.name for path in (ROOT / "tests/unit").iterdir() if path.is_dir())
            raise UserError(
                f"ONLY={word}: no such tests. Name a file below tests/, or a room: "
                f"{' '.join(name for name in rooms if name[0] != '_')} train lab gpu messages."
            )
        tests.append(exists[0])
    return tests


def files(folder: str) -> list[str]:
    """The files of tests in a folder."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("test_*.py"))


def collect(*words: str) -> list[str]:
    """The files of the tests that these words choose."""
    argv = [PYTHON, "-m", "pytest", "--collect-only", "-qq", *words]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()
    return sorted({line.partition(":")[0] for line in lines if ".py:" in line})


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def run(part: Part, log: IO[str] | None = None) -> int:
    # Without the words of this make, which one within a test would take for its own: ONLY=... And
    # some images of machines forbid compiled files: then each program compiles its modules anew.
    own = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TANDEM_GIVEN", "TANDEM_VERBS", "ONLY", "AGAIN"}
    own.add("PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in own}
    env.update(part.env, PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    errors = subprocess.STDOUT if log else None
    code = subprocess.call(part.argv, cwd=ROOT, env=env, stdout=log, stderr=errors)
    for pattern in part.spares if CI else ():
        for path in ROOT.glob(pattern) if pattern[0] != "/" else [Path(pattern)]:
            shutil.rmtree(path, ignore_errors=True)
    return code


def run_with_beside(part: Part) -> list[str]:
    """The names of those that failed. What the other one printed comes when both have ended."""
    if not part.beside:
        return [part.name] * bool(run(part))
    with tempfile.TemporaryFile("w+") as log, ThreadPoolExecutor() as pool:
        other = pool.submit(run, part.beside, log)
        failed = [part.name] * bool(run(part)) + [part.beside.name] * bool(other.result())
        log.seek(0)
        print(f"== {part.beside.name}", log.read(), sep="\n", end="", flush=True)
    return failed


def run_all(verb: str, parts: Sequence[Part]) -> int:
    """Part after part until one fails; the last line says what it took, and what it would take
    next time."""
    spent: dict[bool, float] = {True: 0.0, False: 0.0}
    for part in parts:
        print(f"== {part.name} ({shutil.disk_usage(ROOT).free >> 30} GB free)", flush=True)
        begin = time.monotonic()
        failed = " and ".join(run_with_beside(part))
        took = time.monotonic() - begin
        spent[part.setup] += took
        print(f"== {minutes(took)}", flush=True)
        if failed:
            print(f"== make {verb}: {failed} failed after {minutes(sum(spent.values()))}")
            return 1
    total = minutes(sum(spent.values()))
    print(f"== make {verb}: all passed in {total}; the next time takes {minutes(spent[False])}")
    return 0


@dataclass
class Result:
    """The result of a part of `make test-all`."""

    name: str
    code: int
    seconds: float
    day: str
    commit: str
    last: str  # line that it printed

    def __str__(self) -> str:
        how = "passed" if self.code == 0 else "FAILED"
        line = f"{how}  {self.day} {self.commit}  {minutes(self.seconds):>12}  {self.name}"
        return f"{line}: {self.last}"


def run_pieces(parts: Sequence[Part], again: bool) -> int:
    """Each part once; a summary at the end."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    at = git.run(ROOT, "rev-parse", "--short", "HEAD").strip()
    results = []
    for part in parts:
        place = RESULTS / re.sub(r"\W+", "-", part.name)
        record, log = place.with_suffix(".json"), place.with_suffix(".log")
        before = Result(**json.loads(record.read_text())) if record.exists() else None
        if before and before.code == 0 and not again:
            results.append(before)
            continue
        print(f"== {part.name} ({log})", flush=True)
        begin = time.monotonic()
        with log.open("w") as out:
            code = run(part, out)
        printed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        took, day = time.monotonic() - begin, time.strftime("%d %b")
        ended = Result(part.name, code, took, day, at, printed[-1] if printed else "")
        record.write_text(json.dumps(asdict(ended)))
        results.append(ended)
        print(ended, flush=True)
    print(f"== make test-all, {minutes(sum(result.seconds for result in results))} in all:")
    print(*results, sep="\n")
    return 1 if any(result.code for result in results) else 0


def main(argv: Sequence[str]) -> int:
    ring = argv[0]
    try:
        words = verb_words(ring, argv[1:], f"make {ring}")
        parts = RINGS[ring](words.get("only", ""))
        if ring == "test-all":
            return run_pieces(parts, words.get("again", False))
        return run_all(ring, parts)
    except UserError as error:
        print(f"tandem: {error}".replace("{verb}", ring), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
