"""The surviving lineage of a run: each attempt's samples up to where the next one took up."""

import json
from pathlib import Path


def starts(folders: list[Path]) -> dict[int, dict]:
    """The `start` line of each attempt that began to train, from the nodes' run folders."""
    found = {}
    for folder in folders:
        for path in folder.glob("nodes/*/rank*.steps.jsonl"):
            for line in path.read_text().splitlines():
                if '"start"' in line:
                    start = json.loads(line)
                    found.setdefault(start["attempt"], start)
    return found


def rows(folders: list[Path]) -> dict[int, list[tuple[int, int, int]]]:
    """For each attempt, (epoch, position, index) of what its ranks trained on."""
    found = {}
    for folder in folders:
        for path in folder.glob("samples/rank*.csv"):
            attempt = int(path.name.split(".")[1])
            lines = path.read_text().splitlines()[1:]
            # A rank that is killed may leave half a line.
            whole = [tuple(map(int, line.split(","))) for line in lines if line.count(",") == 2]
            found.setdefault(attempt, []).extend(whole)
    return found


def assert_exact(folders: list[Path], epochs: int) -> int:
    """Asserts each index once in each epoch. Returns how many samples were wasted."""
    begun, logged = starts(folders), rows(folders)
    images = begun[max(begun)]["train_images"]
    kept, vain = [], 0
    for attempt, trained in logged.items():
        ends = [begun[later]["resumed_samples"] for later in begun if later > attempt]
        end = min(ends, default=epochs * images)
        mine = [row for row in trained if row[0] * images + row[1] < end]
        vain += len(trained) - len(mine)
        kept += mine
    for epoch in range(epochs):
        here = sorted((position, index) for e, position, index in kept if e == epoch)
        assert [position for position, _ in here] == list(range(images)), f"epoch {epoch}"
        assert sorted(index for _, index in here) == list(range(images)), f"epoch {epoch}"
    assert len(kept) == epochs * images
    return vain
