"""Write the results of the trials into bench/verdict.md, and say whether they are good enough."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench.verdict.trials import FAULTS, LIVE, Fault, Line, Trial, all_trials
from tests.lab.chaos_run import CHECKOUT

PAGE = CHECKOUT / "bench/verdict.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
RIGHT = 38  # of 40 trials, at least
NEAR = 0.15  # relative error of a predicted speed that counts as right


def read(results: Path) -> list[Line]:
    """Return the newest whole line of each trial."""
    text = results.read_text() if results.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return [*{line["trial"]: line for line in lines}.values()]


def is_right(fault: Fault, line: Line) -> bool:
    return line.get("report") in fault.right.split()


def is_live_right(fault: Fault, line: Line) -> bool:
    """Return whether the answer of `make status` is right."""
    right = fault.right.split()
    return line["live"] in {*right, *map(LIVE.get, right)}


def has_grown(fault: Fault, line: Line) -> bool:
    """Return whether `make compare` shows that the right cause grew most."""
    return line["grew"] in fault.right.replace("compute", "nothing").split()


def share(good: list[bool]) -> str:
    return f"{sum(good)} of {len(good)}" if good else "-"


def words_of(trial: Trial, line: Line) -> str:
    """Return a trial's result for the terminal."""
    if "report" not in line:
        return f"{trial.name}: {line.get('broken') or 'not advised'}"
    busy = f"{100 * line.get('busy', 0):.0f} % of the processors busy"
    if trial.remedy:
        return f"{trial.name}={line['value']}: {off(line)} of what was predicted, {busy}"
    right = "right" if is_right(trial.fault, line) else f"WRONG, not {trial.fault.right}"
    live = f"live {line.get('live')}, grew {line.get('grew')}"
    return f"{trial.name}: {line['report']} ({right}); {live}, {busy}"


def off(line: Line) -> str:
    """Return the relative error of a predicted speed."""
    return f"{100 * (line['came'] / line['predicted'] - 1):+.0f} %"


def matrix(lines: list[Line]) -> str:
    """Return the table with a row for each fault."""
    rows = [
        ["what is done", "expected verdict", "trials", "report", "`make status`", "`make compare`"]
    ]
    rows.append(["---"] * len(rows[0]))
    for name, fault in FAULTS.items():
        trials = [trial for trial in all_trials() if trial.kind == name]
        whole = lines_of(trials, lines)
        wrong = Counter(line["report"] for line in whole if not is_right(fault, line))
        answers = ", ".join(f"{count} x `{answer}`" for answer, count in wrong.items())
        report = share([is_right(fault, line) for line in whole]) + (answers and f" ({answers})")
        live = share([is_live_right(fault, line) for line in whole if "live" in line])
        grew = share([has_grown(fault, line) for line in whole if "grew" in line])
        right = " or ".join(f"`{answer}`" for answer in fault.right.split())
        rows.append([f"{name}: {fault.text}", right, f"{len(trials)}", report, live, grew])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def lines_of(trials: list[Trial], lines: list[Line]) -> list[Line]:
    """Return the lines of these trials, without those whose run failed."""
    names = {trial.name for trial in trials}
    return [line for line in lines if line["trial"] in names and "broken" not in line]


def remedies(lines: list[Line]) -> str:
    """Return the table with a row for each remedy that was tested."""
    rows = [
        ["trial", "advice", "predicted images/s", "measured images/s", "difference"],
        ["---"] * 5,
    ]
    for line in predicted(lines):
        trial, _, remedy = line["trial"].partition("+")
        speeds = [f"{line[key]:.1f}" for key in ("predicted", "came")]
        rows.append([trial, f"{remedy}={line['value']}", *speeds, off(line)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def predicted(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "came" in line]


def write(lines: list[Line]) -> None:
    """Replace the tables of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = f"{matrix(lines)}\n{remedies(lines)}"
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")


def write_blind(seed: str, text: str) -> None:
    """Replace the table of a seed on the page, or add it after those of other seeds."""
    begin, end, last = (
        f"<!-- seed {seed} -->\n",
        "<!-- end of seed -->\n",
        "<!-- end of seeds -->\n",
    )
    before, known, rest = PAGE.read_text().partition(begin)
    if not known:
        before, _, rest = PAGE.read_text().partition(last)
    after = rest.partition(end)[2] if known else f"\n{last}{rest}"
    PAGE.write_text(f"{before}{begin}{text}{end}{after}")


def conclude(lines: list[Line]) -> int:
    """Print the result of all trials. Return the exit code: 0 if they are good enough."""
    trials = {trial.name: trial for trial in all_trials()}
    whole = lines_of([*trials.values()], lines)
    wrong = [line for line in whole if not is_right(trials[line["trial"]].fault, line)]
    blamed = [line for line in wrong if line["report"] == "compute"]
    networks = {"network", "slow_link"}
    blamed = [e for e in blamed if networks & {*trials[e["trial"]].fault.right.split()}]
    live = [is_live_right(trials[line["trial"]].fault, line) for line in whole if "live" in line]
    near = [abs(e["came"] / e["predicted"] - 1) <= NEAR for e in predicted(lines)]
    least = min((line["accounted"] for line in whole), default=0.0)
    for line in wrong:
        print(words_of(trials[line["trial"]], line))
    right = len(whole) - len(wrong)
    print(f"{right} of {len(trials)} right, {share(live)} live; {len(blamed)} network faults")
    print(f"called compute; {share(near)} predictions within {100 * NEAR:.0f} %;")
    busy = max((line["busy"] for line in whole if line["trial"].startswith("nothing")), default=0)
    print(f"at least {100 * least:.1f} % of a run's time is in categories; with nothing wrong at")
    print(f"most {100 * busy:.0f} % of the processors are busy")
    return 0 if right >= RIGHT and not blamed else 1
