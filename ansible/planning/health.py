"""How machines are between runs: what they say, taken at the border, as findings and as a table.

What a machine says may be anything: where it cannot be (border.py), nothing counts as known. Pure
functions.
"""

import re
from dataclasses import asdict

from . import PlanError, border

# Errors that NVIDIA's list ("XID Errors") ascribes to programs first; 45 follows a killed one.
OF_PROGRAMS = frozenset((13, 31, 43, 45))
MEANING = {
    48: "an error in its memory that could not be corrected",
    62: "its own controller halted",
    74: "its NVLink failed",
    79: "it has fallen off the bus",
    94: "an error in its memory that was contained",
    95: "an error in its memory that was not contained",
    119: "its firmware (GSP) gave no answer",
}
HOT = 85  # degrees Celsius of a card that nobody uses; it slows itself down a little above
LOST = ("ERR!", "[Unknown Error]", "[GPU is lost]", "[GPU requires reset]")
COLUMNS = ("machine", "GPU °C", "free GB", "disk errors", "Xid", "kernel")
WIDTHS = (16, 15, 7, 13, 12, 12)  # at most; with a blank between them 80 columns


def health(facts, host):
    """A machine's row: what `health_facts` collected there, checked.

    {"host", "answers": True, "gpus": [{"name", "celsius", "watts", "lost"}], "gpu_error": text or
    None, "disks": [{"folder", "size", "free"}] in bytes, "disk_errors" {device: how many}, "xids"
    {number: how many}, "kernel", "held": [package], "reboot": [what waits for one]}; None (an empty
    text for "kernel") where it is not known.
    """
    try:
        data = border.read(facts, border.Health, host)
    except PlanError:
        data = border.Health()
    smi, errors, text = data.smi, data.errors, ""
    if smi:
        text = "\n".join(_clean(line, 4096) for line in smi.text.split("\n"))
    disk_errors = _counts(errors.disks) if errors else None
    if data.ext4_errors:
        disk_errors = {**(disk_errors or {}), **_counts(data.ext4_errors)}
    numbers = {name: many for name, many in errors.xids.items() if many} if errors else {}
    xids = {int(name): n for name, n in numbers.items() if re.fullmatch(r"[0-9]{1,4}", name)}
    reboot = [f"kernel {_clean(data.waiting_kernel, 60)}"] if data.waiting_kernel else []
    if data.reboot_required and not reboot:
        reboot.append("an update of packages")
    failed = smi is not None and not smi.done
    return {
        "host": host,
        "answers": True,
        "gpus": _gpus(text) if smi and smi.done else [],
        "gpu_error": (" ".join(text.split())[:200] or "no reason") if failed else None,
        "disks": [
            {**asdict(disk), "folder": _clean(disk.folder, 100)} for disk in data.disks[:100]
        ],
        "disk_errors": disk_errors,
        "xids": xids if errors else None,
        "kernel": _clean(data.kernel, 60),
        "held": None if data.held is None else [_clean(name, 100) for name in data.held[:1000]],
        "reboot": reboot,
    }


def absent(host):
    """The row of a machine that gave no answer."""
    return {"host": host, "answers": False}


def _clean(text, longest):
    """A text without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:longest])


def _counts(numbers):
    return {_clean(name, 40): many for name, many in numbers.items() if name and many}


def _gpus(text):
    """The cards of `nvidia-smi --query-gpu=index,temperature.gpu,power.draw,name`, as CSV."""
    cards = []
    for line in text.splitlines()[:64]:
        words = [word.strip() for word in line.split(",", 3)]
        if len(words) == 4 and words[0].isdecimal():
            card = {"name": words[3][:60], "celsius": _measured(words[1], -50, 200)}
            card["watts"] = _measured(words[2], 0, 5000)
            cards.append({**card, "lost": any(word in LOST for word in words)})
    return cards


def _measured(word, low, high):
    """ "41" or "18.52"; None for "[N/A]", "[Not Supported]" and "ERR!"."""
    try:
        return float(word) if low <= float(word) <= high else None
    except ValueError:
        return None


def findings(row):
    """Problems, and notes, of a machine's row: see planning/preflight.py."""
    if not row["answers"]:
        return []
    rows = [*_of_cards(row), *_of_log(row), *_of_reboot(row)]
    return [dict(zip(("host", "fault", "cause", "remedy"), (row["host"], *rest))) for rest in rows]


def _of_cards(row):
    if row["gpu_error"] is not None:
        yield "gpu_failed", f"nvidia-smi fails: {row['gpu_error']}", _SEAT
    for number, card in enumerate(row["gpus"]):
        if card["lost"]:
            yield (
                "gpu_failed",
                f"its card {number}, {card['name']}, reports errors instead of figures",
                _SEAT,
            )
        elif card["celsius"] is not None and card["celsius"] >= HOT:
            yield (
                "gpu_hot",
                f"its card {number}, {card['name']}, is at {card['celsius']:.0f} degrees Celsius",
                "if nobody is using it: see that its fans turn and are free of dust, and give "
                "it air; or set driver_power_limit_watts in group_vars/all.yml",
            )


_SEAT = (
    "reboot it; if it comes back, the card sits loose, is too hot or gets too little power: see "
    "its seat and its cables"
)


def _of_log(row):
    for number, many in sorted((row["xids"] or {}).items()):
        what = f" ({MEANING[number]})" if number in MEANING else ""
        times = "once" if many == 1 else f"{many} times"
        cause = f"its kernel has logged the NVIDIA error Xid {number}{what} {times} since it booted"
        if number in OF_PROGRAMS:
            yield "xid_program", cause, "nothing, if a program was killed or crashed at that time"
        else:
            yield "xid", cause, f"see sudo journalctl -kb | grep Xid there; {_SEAT}"
    for device, many in sorted((row["disk_errors"] or {}).items()):
        yield (
            "disk_errors",
            f"errors of its disk {device} are recorded: {many}",
            "copy away what you need from it; sudo smartctl -a (package smartmontools) says how "
            "the disk is, and fsck mends its file system",
        )


def _of_reboot(row):
    if row["reboot"]:
        waits = f"{' and '.join(row['reboot'])} waits for a reboot"
        yield "reboot_waits", waits, "when nothing trains there: sudo reboot"


def table(rows):
    """Lines of at most 80 columns: a head, then one for each machine, in the order of `rows`."""
    names = [len(row["host"]) for row in rows]
    cells = [COLUMNS, *(_cells(row) for row in rows if row["answers"])]
    longest = [max(len(line[place]) for line in cells) for place in range(len(COLUMNS))]
    longest[0] = max(longest[0], *names) if names else longest[0]
    widths = [min(pair) for pair in zip(WIDTHS, longest)]
    lines = [_line(COLUMNS, widths)]
    for row in rows:
        silent = (row["host"], "does not answer")
        lines.append(
            _line(_cells(row), widths) if row["answers"] else _line(silent, (widths[0], 20))
        )
    if any("?" in line for line in lines):
        lines.append("?: not known, since sudo was refused or nothing there reports it")
    return lines


def _line(cells, widths):
    texts = (
        cell if len(cell) <= width else cell[: width - 1] + "~"
        for cell, width in zip(cells, widths)
    )
    return " ".join(cell.ljust(width) for cell, width in zip(texts, widths)).rstrip()


def _cells(row):
    cards = ["ERR" if card["lost"] else _degrees(card["celsius"]) for card in row["gpus"]]
    gpus = "fails" if row["gpu_error"] is not None else " ".join(cards) or "-"
    free = f"{min(disk['free'] for disk in row['disks']) / 1e9:.0f}" if row["disks"] else "?"
    kernel = [
        "held" if any(name.startswith("linux-") for name in row["held"] or []) else "",
        "reboot" if row["reboot"] else "",
    ]
    return (
        row["host"],
        gpus,
        free,
        _listed(row["disk_errors"]),
        _listed(row["xids"]),
        ", ".join(filter(None, kernel)) or ("?" if row["held"] is None else "-"),
    )


def _degrees(celsius):
    return "?" if celsius is None else f"{celsius:.0f}"


def _listed(counts):
    return "?" if counts is None else " ".join(str(name) for name in sorted(counts)) or "-"
