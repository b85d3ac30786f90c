"""Write the tables of docs/stacks.md from ansible/stacks.yml.

Run this file after a change of stacks.yml. A test compares the page with the tables.
"""

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
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, row in table["rows"].items():
        entries = table["toolkits"].get(row.get("toolkit"), [])
        versions = {entry["name"]: entry["version"] for entry in entries}
        on_request = "" if row.get("toolkit_default") or not versions else " (on request)"
        # As texts, 3.10 would come before 3.9.
        pythons = sorted(
            row["python"], key=lambda text: [int(digits) for digits in text.split(".")]
        )
        # The oldest and newest generation of GPUs that the row's torch has code for. Binary code
        # for sm_70 also runs on sm_75: the same major capability, and no older minor one.
        gpus = "none"
        if "sm" in row:
            names = {entry["sm"]: entry["name"] for entry in table["gpus"]["generations"]}
            supported = [sm for sm in names for c in row["sm"] if c // 10 == sm // 10 and c <= sm]
            oldest, newest = min(supported), max(supported)
            gpus = f"{names[oldest]} (sm_{oldest}) to {names[newest]} (sm_{newest})"
        cells = [
            f"`{name}`",
            row["torch"],
            row["torchvision"],
            pythons[0] if len(pythons) == 1 else f"{pythons[0]} to {pythons[-1]}",
            row["glibc"],
            f">= {row['driver']}" if row.get("driver") else "none",
            versions.get("cuda", "none") + on_request,
            versions.get("cudnn", "none"),
            versions.get("nccl", "none"),
            row.get("apex", "none"),
            gpus,
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return lines


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
    """Return the table of files, with the source of each."""
    lines = ["| file | for | source | SHA-256 |", "|---|---|---|---|"]
    rows = [
        (f"CUDA {name}", entry) for name, entries in table["toolkits"].items() for entry in entries
    ]
    for name, entry in table["apex"].items():
        users = [f"`{stack}`" for stack, row in table["rows"].items() if row.get("apex") == name]
        rows.append((", ".join(users), entry))
    for purpose, entry in rows:
        address = entry["url"] or entry.get("git")
        source = "automatic download" if address else f"download by hand from <{entry['page']}>"
        digest = f"`{entry['sha256'][:12]}...`" if entry["sha256"] else "recorded at first use"
        if entry.get("commit"):
            digest = f"git's commit `{entry['commit'][:12]}...`"
        lines.append(f"| `{entry['file']}` | {purpose} | {source} | {digest} |")
    return lines


TABLES = {"stacks": stacks, "drivers": drivers, "files": files}


def page(text, table):
    """Return the page with new tables."""
    for name, make_table in TABLES.items():
        before, begin, after = text.partition(BEGIN.format(name) + "\n")
        if not begin:
            raise ValueError(f"docs/stacks.md has no line {BEGIN.format(name)}")
        text = before + begin + "\n".join(make_table(table)) + "\n" + after[after.index(END) :]
    return text


def main():
    table = yaml.safe_load((ANSIBLE / "stacks.yml").read_text())["stacks"]
    PAGE.write_text(page(PAGE.read_text(), table))


if __name__ == "__main__":
    main()
