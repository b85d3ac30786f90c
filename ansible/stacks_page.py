"""Write the tables of docs/stacks.md from ansible/stacks.yml. Run it after changing that file."""

from pathlib import Path

import yaml

ANSIBLE = Path(__file__).resolve().parent
PAGE = ANSIBLE.parent / "docs" / "stacks.md"
COLUMNS = (
    *("stack", "torch", "torchvision", "Python", "glibc", "driver"),
    *("CUDA toolkit", "cuDNN", "NCCL", "apex", "GPUs"),
)
BEGIN, END = "<!-- from ansible/stacks.yml: {} -->", "<!-- end -->"


def stacks(table):
    """Return the table of versions that belong together, one row per stack."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    for name, row in table["rows"].items():
        parts = table["toolkits"].get(row.get("toolkit"), [])
        versions = {part["name"]: part["version"] for part in parts}
        kit = "" if row.get("toolkit_default") or not versions else " (on request)"
        cells = [
            f"`{name}`",
            row["torch"],
            row["torchvision"],
            _range(row["python"]),
            row["glibc"],
            f">= {row['driver']}" if row.get("driver") else "none",
            versions.get("cuda", "none") + kit,
            versions.get("cudnn", "none"),
            versions.get("nccl", "none"),
            row.get("apex", "none"),
            _cards(row, table),
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return lines


def _users(apex, table):
    """List the stacks that have this row of apex: "`cu102`, `cu113`"."""
    return ", ".join(f"`{name}`" for name, row in table["rows"].items() if row.get("apex") == apex)


def _range(pythons):
    # As text, 3.10 would come before 3.9.
    ordered = sorted(pythons, key=lambda text: [int(number) for number in text.split(".")])
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _cards(row, table):
    """Name the oldest and newest generation of GPUs that the row's torch has code for."""
    if "sm" not in row:
        return "none"
    generations = {entry["sm"]: entry["name"] for entry in table["gpus"]["generations"]}
    # Binary code runs on the same major capability from its minor one on.
    runs = [
        sm for sm in sorted(generations) if any(b // 10 == sm // 10 and b <= sm for b in row["sm"])
    ]
    return f"{generations[runs[0]]} (sm_{runs[0]}) to {generations[runs[-1]]} (sm_{runs[-1]})"


def drivers(table):
    lines = ["| driver | compute capability | kernels |", "|---|---|---|"]
    for row in table["drivers"]:
        kernel = f"{row['kernel']['min']} or newer"
        if row["kernel"]["below"]:
            kernel = f"{row['kernel']['min']} to below {row['kernel']['below']}"
        lines.append(
            f"| {row['version']} | {row['sm']['min'] / 10} to {row['sm']['max'] / 10} | {kernel} |"
        )
    return lines


def files(table):
    """List the source of each file."""
    lines = ["| file | for | source | SHA-256 |", "|---|---|---|---|"]
    rows = [
        (f"CUDA {name}", part) for name, parts in table["toolkits"].items() for part in parts
    ] + [(_users(name, table), part) for name, part in table["apex"].items()]
    for purpose, part in rows:
        address = part["url"] or part.get("git")
        source = "automatic download" if address else f"download by hand from <{part['page']}>"
        digest = f"`{part['sha256'][:12]}...`" if part["sha256"] else "recorded at first use"
        if part.get("commit"):
            digest = f"git's commit `{part['commit'][:12]}...`"
        lines.append(f"| `{part['file']}` | {purpose} | {source} | {digest} |")
    return lines


TABLES = {"stacks": stacks, "drivers": drivers, "files": files}


def page(text, table):
    """Return the page with new tables."""
    for name, make in TABLES.items():
        head, begin, tail = text.partition(BEGIN.format(name) + "\n")
        if not begin:
            raise ValueError(f"docs/stacks.md has no line {BEGIN.format(name)}")
        text = head + begin + "\n".join(make(table)) + "\n" + tail[tail.index(END) :]
    return text


def main():
    table = yaml.safe_load((ANSIBLE / "stacks.yml").read_text())["stacks"]
    PAGE.write_text(page(PAGE.read_text(), table))


if __name__ == "__main__":
    main()
