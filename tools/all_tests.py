"""`make test-all`: what `make test` and `make test-lab` leave out, in pieces. It keeps what each
piece printed and how it ended in .tandem/test-all/, and leaves out what passed there before: broken
off, it goes on where it was; AGAIN=1 begins anew.

Standard library only, Python >= 3.11: it runs before there is an environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

from contract.command_line import verb_words
from contract.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ".venv/bin/python"
RESULTS = ROOT / ".tandem/test-all"
SETUP = (
    ("tools/apt.sh", "tools/test-packages.txt", "lab/packages.txt"),
    ("tools/venv.sh", "dev"),
    (PYTHON, "examples/digits.py", "data/digits"),
)


class Part(NamedTuple):
    """`more`: of the environment."""

    name: str
    argv: tuple[str, ...]
    more: Mapping[str, str] = MappingProxyType({})


def pytest(name: str, *words: str, **more: str) -> Part:
    """With an hour for a test, within which machines boot and are provisioned."""
    argv = (PYTHON, "-m", "pytest", "--quiet", "--durations=15", "--durations-min=2")
    return Part(name, (*argv, "-o", "faulthandler_timeout=3600", *words), more)


def all_parts() -> Iterator[Part]:
    """One for each file with tests that are marked long, and what else takes long."""
    for file in collect("-m", "long", "tests/unit", "tests/train", "tests/lab"):
        yield pytest(file, "-m", "long", file)
    for path in sorted((ROOT / "bench").glob("test_*.py")):
        yield pytest(f"bench/{path.name}", f"bench/{path.name}")
    yield pytest("40 faults", "tests/lab/test_chaos.py", TANDEM_CHAOS_TRIALS="40")
    yield pytest("fuzzers", "-m", "hypothesis", "tests/unit", TANDEM_FUZZ="1")
    yield Part("test-gpu on the CPU", ("tools/test-gpu.sh", "--device=cpu"), {"PYTHON": PYTHON})
    yield Part("40 verdicts", (PYTHON, "-m", "bench.verdict"))


def collect(*words: str) -> list[str]:
    """The files of the tests that these words choose."""
    argv = [PYTHON, "-m", "pytest", "--collect-only", "-qq", *words]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()
    return sorted({line.partition(":")[0] for line in lines if ".py:" in line})


def run(part: Part, log: IO[str] | None = None) -> int:
    # Without the words of this make, as tools/test.sh.
    own = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TANDEM_GIVEN", "TANDEM_VERBS", "ONLY", "AGAIN"}
    own.add("PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in own}
    env.update(part.more, PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    errors = subprocess.STDOUT if log else None
    return subprocess.call(part.argv, cwd=ROOT, env=env, stdout=log, stderr=errors)


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


@dataclass
class Result:
    """The result of a part."""

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


def run_parts(parts: Sequence[Part], again: bool) -> int:
    """Each part once; a summary at the end."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = ["git", "rev-parse", "--short", "HEAD"]
    at = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
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
    try:
        words = verb_words("test-all", argv, "make test-all")
        if os.geteuid():
            raise UserError("most of these tests boot machines: sudo make test-all")
        for words_of_setup in SETUP:
            if code := run(Part("set-up", words_of_setup)):
                return code
        parts = [part for part in all_parts() if words.get("only", "") in part.name]
        return run_parts(parts, words.get("again", False))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return UserError.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
