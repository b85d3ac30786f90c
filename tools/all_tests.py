"""Run the tests that `make test` and `make test-lab` omit, in pieces: `make test-all`.

The output and result of each piece are in .tandem/test-all/. A piece that passed is not repeated,
so the same command continues after an interruption; AGAIN=1 repeats all pieces.

This file uses only the standard library (Python >= 3.11), since it makes the environment.
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


class Piece(NamedTuple):
    """A command of `make test-all`, with its own log and result."""

    name: str
    argv: tuple[str, ...]
    variables: Mapping[str, str] = MappingProxyType({})  # added to the environment


def make_pytest_piece(name: str, *words: str, **variables: str) -> Piece:
    """Make a piece that runs pytest with these words of its command line."""
    argv = (PYTHON, "-m", "pytest", "--quiet", "--durations=15", "--durations-min=2")
    # A test may boot and provision machines for an hour.
    return Piece(name, (*argv, "-o", "faulthandler_timeout=3600", *words), variables)


def list_pieces() -> Iterator[Piece]:
    """Yield the pieces: each file with tests that are marked long, benchmarks, faults, fuzzers."""
    for file in collect_files("-m", "long", "tests/unit", "tests/train", "tests/lab"):
        yield make_pytest_piece(file, "-m", "long", file)
    for path in sorted((ROOT / "bench").glob("test_*.py")):
        yield make_pytest_piece(f"bench/{path.name}", f"bench/{path.name}")
    yield make_pytest_piece("40 faults", "tests/lab/test_chaos.py", TANDEM_CHAOS_TRIALS="40")
    yield make_pytest_piece("fuzzers", "-m", "hypothesis", "tests/unit", TANDEM_FUZZ="1")
    yield Piece("test-gpu on the CPU", ("tools/test-gpu.sh", "--device=cpu"), {"PYTHON": PYTHON})
    yield Piece("40 verdicts", (PYTHON, "-m", "bench.verdict"))


def collect_files(*words: str) -> list[str]:
    """Return the files of the tests that these words of pytest select."""
    argv = [PYTHON, "-m", "pytest", "--collect-only", "-qq", *words]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    # With -qq pytest prints a line per file: "tests/unit/tools/test_sweep.py: 23".
    lines = process.stdout.splitlines()
    return sorted({line.partition(":")[0] for line in lines if ".py:" in line})


def run(piece: Piece, log: IO[str] | None = None) -> int:
    """Run a piece, and return its exit code."""
    # Tests call make, which would read these variables of the present make.
    removed = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TANDEM_GIVEN", "TANDEM_VERBS", "ONLY", "AGAIN"}
    removed.add("PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    env.update(piece.variables, PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    errors = subprocess.STDOUT if log else None
    return subprocess.call(piece.argv, cwd=ROOT, env=env, stdout=log, stderr=errors)


def minutes(seconds: float) -> str:
    """Format a duration: "42 s" or "12 min 07 s"."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


@dataclass
class Result:
    """The result of a piece, as stored in .tandem/test-all/NAME.json."""

    name: str
    code: int  # the exit code
    seconds: float
    day: str
    commit: str
    last: str  # the last line of the output; earlier records have this name too

    def __str__(self) -> str:
        word = "passed" if self.code == 0 else "FAILED"
        line = f"{word}  {self.day} {self.commit}  {minutes(self.seconds):>12}  {self.name}"
        return f"{line}: {self.last}"


def run_pieces(pieces: Sequence[Piece], again: bool) -> int:
    """Run each piece, or with `again` also those that passed before. Returns the exit code."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    argv = ["git", "rev-parse", "--short", "HEAD"]
    output = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    results = []
    for piece in pieces:
        path = RESULTS / re.sub(r"\W+", "-", piece.name)
        record, log = path.with_suffix(".json"), path.with_suffix(".log")
        if record.exists() and not again:
            stored = Result(**json.loads(record.read_text()))
            if stored.code == 0:
                results.append(stored)
                continue
        print(f"== {piece.name} ({log})", flush=True)
        begin = time.monotonic()
        with log.open("w") as file:
            code = run(piece, file)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        seconds, day = time.monotonic() - begin, time.strftime("%d %b")
        last_line = lines[-1] if lines else ""
        result = Result(piece.name, code, seconds, day, output.strip(), last_line)
        # The result is stored after each piece, so an interruption loses at most one.
        record.write_text(json.dumps(asdict(result)))
        results.append(result)
        print(result, flush=True)
    print(f"== make test-all, {minutes(sum(result.seconds for result in results))} in all:")
    print(*results, sep="\n")
    return 1 if any(result.code for result in results) else 0


def main(argv: Sequence[str]) -> int:
    try:
        words = verb_words("test-all", argv, "make test-all")
        # This error must come before the setup, which takes minutes.
        if os.geteuid():
            raise UserError("most of these tests boot machines: sudo make test-all")
        for argv_of_setup in SETUP:
            if code := run(Piece("set-up", argv_of_setup)):
                return code
        pieces = [piece for piece in list_pieces() if words.get("only", "") in piece.name]
        return run_pieces(pieces, words.get("again", False))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return UserError.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
