"""Do the tests notice when a rule is changed? `make mutants` (root).

    python -m bench.mutants draw                       # once: bench/mutants.jsonl
    python -m bench.mutants reach before tests/unit    # which test reaches which line
    python -m bench.mutants judge before               # each mutant by these tests
    python -m bench.mutants table before after         # in pairs
    python -m bench.mutants run                        # all of it, by the tests of `make test`

A mutant is one small change of the product: another comparison, boundary, constant or order of
arguments, a negated condition, a statement left out. They are drawn at random with a fixed seed,
half of them from CRITICAL, whose rules lose data, train wrongly or let somebody in.

A mutant is judged by the tests that reach its line in their own process, and, where there are none
or the room's work is done by processes of its own (SPAWNING), by the tests of its room; the
quickest first, as many as took LONGEST seconds, stopped at the first failure. It is `killed` by a
failing test or by one that hangs, else it has `survived`. Each runs in namespaces of its own, in
which only a copy of the checkout and an empty /tmp can be written and no process but its own be
seen: a mutant may delete or signal what it should not. `judge` goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ROOT / "bench/mutants.jsonl"
SCRATCH = Path("/var/tmp/tandem-mutants")  # a disk: /tmp is covered in the namespaces
SEED, COUNT = 20261125, 120
LONGEST = 120.0  # seconds of tests for one mutant
ROOMS = ("contract", "boundary", "tandem", "trainer", "launcher", "report", "ansible/planning")
CRITICAL = (
    *("trainer/checkpoint.py", "trainer/writer.py", "trainer/snapshots.py", "trainer/resume.py"),
    *(
        "launcher/collect.py",
        "launcher/outputs.py",
        "launcher/folders.py",
        "launcher/background.py",
    ),
    *("contract/split.py", "tandem/sync/*.py", "tandem/exchange.py", "trainer/step.py"),
    *("trainer/train.py", "trainer/optim.py", "trainer/ema.py", "trainer/evaluate.py"),
    *("trainer/finite.py", "trainer/parallel.py", "trainer/syncbn.py", "trainer/data/*.py"),
    *("launcher/plan/balance.py", "boundary/*.py", "contract/machines.py"),
    *("launcher/machines/ssh.py", "ansible/planning/firewall.py", "tandem/compat.py"),
    *("ansible/planning/reading.py", "ansible/planning/share.py", "launcher/node/machine_lock.py"),
    *("launcher/node/link.py", "launcher/watch/guards.py", "launcher/plan/script.py"),
)
# Rooms much of whose work is done by processes that the tests start, where nothing is recorded.
SPAWNING = ("launcher/node/", "trainer/", "tandem/")
TESTS = {
    "contract": ("tests/unit/contract",),
    "boundary": ("tests/unit/launcher", "tests/unit/ansible", "tests/unit/report"),
    "tandem": ("tests/unit/tandem", "tests/unit/trainer/test_sync"),
    "trainer": ("tests/unit/trainer", "tests/train"),
    "launcher": ("tests/unit/launcher", "tests/train"),
    "report": ("tests/unit/report",),
    "ansible": ("tests/unit/ansible",),
}

SWAPPED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in",
}  # fmt: skip
BOUNDARY = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True)
class Mutant:
    """`old` at `start` (bytes of the file) becomes `new`; `statement` and `nth` find it again in
    a later version: the nth of the candidates in `function` that read the same."""

    file: str
    function: str
    line: int
    kind: str
    statement: str
    old: str
    new: str
    nth: int
    start: int

    @property
    def key(self) -> tuple[object, ...]:
        return (self.file, self.function, self.kind, self.statement, self.old, self.new, self.nth)

    @property
    def critical(self) -> bool:
        return any(fnmatchcase(self.file, pattern) for pattern in CRITICAL)


class Candidates(ast.NodeVisitor):
    """Every mutant of one file."""

    def __init__(self, file: str, text: bytes) -> None:
        self.file, self.text = file, text
        starts = [0]
        for line in text.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        self.starts = starts
        self.functions: list[str] = []
        self.statement: ast.stmt | None = None
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(text))

    def at(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind: str, node: ast.expr | ast.stmt, new: str, stop: int | None = None) -> None:
        """`new` takes the place of a node; with `stop` it is put between the node and there."""
        start, end = self.at(node)
        if stop is not None:
            start, end = end, stop
        header = ast.unparse(self.statement).split("\n", 1)[0] if self.statement else ""
        mutant = Mutant(
            self.file, ".".join(self.functions), node.lineno, kind, header,
            self.text[start:end].decode(), new, 0, start,
        )  # fmt: skip
        nth = sum(other.key[:-1] == mutant.key[:-1] for other in self.mutants)
        self.mutants.append(Mutant(**{**asdict(mutant), "nth": nth}))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)

    def visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Neither decorators nor annotations."""
        self.functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_scope

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:]):
            new = SWAPPED.get(type(op)) or BOUNDARY.get(type(op))
            kind = "comparison" if type(op) in SWAPPED else "boundary"
            end, start = self.at(left)[1], self.at(right)[0]
            if new and not self.text[end:start].strip(b" notisn=<>!"):
                self.add(kind, left, f" {new} ", start)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.add("constant", node, repr(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """What is said: its parts have no places of their own before Python 3.12."""

    def visit_If(self, node: ast.If) -> None:
        start, end = self.at(node.test)
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.add("condition", node.test, f"not ({self.text[start:end].decode()})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args):
            (start, end), (begin, stop) = self.at(node.args[0]), self.at(node.args[1])
            first, second = self.text[start:end].decode(), self.text[begin:stop].decode()
            if first != second:
                middle = self.text[end:begin].decode()
                span = ast.copy_location(ast.Constant(0), node.args[0])
                span.end_lineno = node.args[1].end_lineno
                span.end_col_offset = node.args[1].end_col_offset
                self.add("arguments", span, f"{second}{middle}{first}")
        self.generic_visit(node)

    def leave_out(self, node: ast.stmt) -> None:
        self.add("statement", node, "pass")
        self.generic_visit(node)

    visit_Raise = visit_AugAssign = visit_Return = visit_Delete = leave_out

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.leave_out(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.leave_out(node)
        else:
            self.generic_visit(node)


def candidates(root: Path) -> Iterator[Mutant]:
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            yield from Candidates(str(path.relative_to(root)), path.read_bytes()).mutants


def draw(root: Path) -> list[Mutant]:
    """COUNT mutants: of both halves the kinds in turn, and of a kind the files in turn."""
    dice = random.Random(SEED)
    pool = list(candidates(root))
    drawn = []
    for critical in (True, False):
        of_kind: dict[str, list[Mutant]] = {}
        for mutant in dice.sample(pool, len(pool)):
            if mutant.critical is critical:
                of_kind.setdefault(mutant.kind, []).append(mutant)
        kinds = sorted(of_kind)
        drawn += [of_kind[kinds[n % len(kinds)]][n // len(kinds)] for n in range(COUNT // 2)]
    return drawn


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def copy_of(root: Path, name: str) -> Path:
    """A copy of what git tracks, beside the environment and the digits."""
    place = SCRATCH / name
    if not place.exists():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", root, place], check=True)
        (place / ".venv").symlink_to((root / ".venv").resolve())
        shutil.copytree(root / "data/digits", place / "data/digits")
    return place


def run_tests(tree: Path, words: Sequence[str], seconds: float) -> tuple[int, str]:
    """pytest's exit code (124 where it did not end in time) and the last of what it printed."""
    # No name server can be asked here, and each question would wait for one.
    names = "printf '%s localhost '$(hostname)'\\n' 127.0.0.1 ::1 ::ffff:127.0.0.1 > /tmp/hosts"
    setup = (
        f"mount --bind {tree} {tree} && mount -o remount,ro,bind / && mount -t tmpfs tmp /tmp"
        f" && {names} && mount --bind /tmp/hosts /etc/hosts"
        " && mount --bind /dev/null /etc/resolv.conf"
        f' && ip link set lo up && cd {tree} && "$@"'  # its child: it reaps
    )
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    pytest = [".venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    clean = {"HOME": "/tmp", "PATH": f"{tree}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    with subprocess.Popen(
        [*apart, "sh", "-c", setup, "sh", *pytest],
        env={**clean, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            return 124, out[-2000:]
    return process.returncode, out[-2000:]


def reach(root: Path, name: str, folders: Sequence[str]) -> None:
    """Runs all tests once and writes SCRATCH/NAME.reach.json: {test: seconds} and {file: {line:
    tests}}. A test that fails here is left out, and named."""
    from coverage import CoverageData

    tree = copy_of(root, name)
    for old in (*tree.glob(".reach.*"), *tree.glob(".seconds.*")):
        old.unlink()
    words = ["-p", "bench.mutants_reach", "--numprocesses=3", "--dist=worksteal", "-m", "not long"]
    (tree / "bench").mkdir(exist_ok=True)  # an older checkout has none
    shutil.copy(ROOT / "bench/mutants_reach.py", tree / "bench")
    code, out = run_tests(tree, [*words, *folders], 7200)
    print(code, out)
    seconds: dict[str, float] = {}
    failed = set()
    for part in tree.glob(".seconds.*"):
        for row in read_lines(part):
            seconds[row["test"]] = seconds.get(row["test"], 0.0) + row["seconds"]
            if row["failed"]:
                failed.add(row["test"])
    lines: dict[str, dict[str, list[str]]] = {}
    for part in tree.glob(".reach.*"):
        data = CoverageData(str(part))
        data.read()
        for file in data.measured_files():
            place = lines.setdefault(str(Path(file).relative_to(tree)), {})
            for line, tests in data.contexts_by_lineno(file).items():
                place.setdefault(str(line), []).extend(test for test in tests if test)
    for test in failed:
        print("fails here, left out:", test)
        seconds.pop(test, None)
    (SCRATCH / f"{name}.reach.json").write_text(json.dumps({"seconds": seconds, "lines": lines}))


def tests_of(mutant: Mutant, reached: dict) -> list[str]:
    """The quickest first, as many as took LONGEST seconds."""
    seconds = reached["seconds"]
    line = reached["lines"].get(mutant.file, {}).get(str(mutant.line), [])
    direct = {test for test in line if test in seconds}
    rooms = TESTS[mutant.file.split("/", 1)[0]]
    near = {test for test in seconds if test.startswith(rooms)} - direct
    stem = Path(mutant.file).stem
    spawned = not direct or mutant.file.startswith(SPAWNING)
    ordered = sorted(direct, key=seconds.__getitem__)
    if spawned:  # files that are named like the module before the others
        ordered += sorted(near, key=lambda test: (stem not in test, seconds[test]))
    else:  # reviewed sentences are rendered by processes of their own
        ordered += [test for test in seconds if test.startswith("tests/messages")]
    chosen, spent = [], 0.0
    for test in ordered:
        spent += seconds[test]
        if chosen and spent > LONGEST:
            break
        chosen.append(test)
    return chosen


def judge(root: Path, name: str, part: int, parts: int) -> None:
    """Writes a line for each mutant to SCRATCH/NAME.PART.jsonl; those that stand there are done."""
    tree = copy_of(root, f"{name}{part}")
    reached = json.loads((SCRATCH / f"{name}.reach.json").read_text())
    out = SCRATCH / f"{name}.{part}.jsonl"
    judged = {row["id"] for row in read_lines(out)}
    here = {mutant.key: mutant for mutant in candidates(tree)}
    for row in read_lines(DRAWN)[part::parts]:
        if row["id"] in judged:
            continue
        wanted = Mutant(
            **{key: value for key, value in row.items() if key not in ("id", "critical")}
        )
        mutant = here.get(wanted.key)
        verdict, tests, last = "gone", [], ""
        if mutant:
            tests = tests_of(mutant, reached)
            path = tree / mutant.file
            text = path.read_bytes()
            end = mutant.start + len(mutant.old.encode())
            assert text[mutant.start : end].decode() == mutant.old
            path.write_bytes(text[: mutant.start] + mutant.new.encode() + text[end:])
            (tree / ".tests").write_text("\n".join(tests))
            try:
                code, last = run_tests(tree, ["-x", "-m", "not long", "@.tests"], 3 * LONGEST)
            finally:
                path.write_bytes(text)
            verdict = {0: "survived", 1: "killed", 2: "killed", 124: "late"}.get(code, "error")
        with out.open("a") as file:
            row = {"id": row["id"], "verdict": verdict, "tests": len(tests), "last": last[-300:]}
            file.write(json.dumps(row) + "\n")


def table(before: str, after: str) -> None:
    """In pairs, and each mutant that survives."""
    drawn = {row["id"]: row for row in read_lines(DRAWN)}
    verdicts = {
        name: {
            r["id"]: r["verdict"] for p in SCRATCH.glob(f"{name}.*.jsonl") for r in read_lines(p)
        }
        for name in (before, after)
    }
    both = sorted(
        n for n in drawn if all(v.get(n) in ("killed", "survived") for v in verdicts.values())
    )
    for name, verdict in verdicts.items():
        killed = sum(verdict[n] == "killed" for n in both)
        print(f"{name}: {killed} of {len(both)} killed; {len(drawn) - len(verdict)} not judged")
    for n in sorted(drawn):
        row, pair = drawn[n], [verdict.get(n, "-") for verdict in verdicts.values()]
        if pair != ["killed", "killed"]:
            mark = "critical" if row["critical"] else ""
            print(f"{n:3} {'/'.join(pair):18} {row['file']}:{row['line']} {row['kind']} {mark}")
            print(f"    {row['statement'][:100]} | {row['old'][:40]!r} -> {row['new'][:60]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the tests notice when a rule is changed?")
    parser.add_argument("step", choices=("draw", "reach", "judge", "table", "run"))
    parser.add_argument("words", nargs="*", help="reach: NAME TESTS...; judge: NAME; table: A B")
    parser.add_argument("--part", type=int, default=0, help="of --parts that judge side by side")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    args = parser.parse_args()
    if args.step == "draw":
        rows = [
            {"id": n, "critical": mutant.critical, **asdict(mutant)}
            for n, mutant in enumerate(draw(args.root))
        ]
        DRAWN.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif args.step == "reach":
        reach(args.root, args.words[0], args.words[1:])
    elif args.step == "run":
        reach(args.root, "now", ["tests/unit", "tests/messages"])
        judge(args.root, "now", 0, 1)
        table("now", "now")
    elif args.step == "judge":
        judge(args.root, args.words[0], args.part, args.parts)
    else:
        table(*args.words)


if __name__ == "__main__":
    sys.exit(main())
