"""Data sets as they are found, copied by role data."""

import json
import os

from tests.lab.site_plays import (
    changes,
    complaint,
    failures,
    play,
    said,
    write_inventory,
    write_play,
)


def links_into(full, root):
    """Five classes: two are links, relative and absolute, one has its images as links."""
    for split in ("train", "val"):
        for name in ("n1", "n2", "n3", "n4", "n5"):
            (full / split / name).mkdir(parents=True)
            for number in range(4):
                (full / split / name / f"{number}.jpg").write_text(f"{split} {name} {number}")
        (root / split / "n3").mkdir(parents=True)
        (root / split / "n1").symlink_to(f"../../../full/{split}/n1")
        (root / split / "n2").symlink_to(full / split / "n2")
        for image in (full / split / "n3").iterdir():
            (root / split / "n3" / image.name).symlink_to(image)
        (full / split / "n4").rename(root / split / "n4")
        (full / split / "n5").rename(root / split / "n5")


def test_links_arrive_as_what_they_lead_to_and_a_shell_that_prints_is_named(pair, tmp_path):
    root = tmp_path / "data/small"
    links_into(tmp_path / "full", root)
    hosts = write_inventory(tmp_path, {"node1": "ansible_host=192.168.56.111"})
    sets = ["small", {"name": "texts", "kind": "files"}]
    given = {"data_root": "/srv/tandem/data", "data_sets": sets, "run_user": "tandem"}
    given["node_dir"] = "tandem"
    given["data_source"] = str(root.parent)
    (tmp_path / "data/texts/deep").mkdir(parents=True)
    (tmp_path / "data/texts/deep/.a b.txt").write_text("a")
    with (tmp_path / "data/texts/holes.h5").open("wb") as file:
        file.truncate(1 << 28)
    words = ["--inventory", hosts, "-e", json.dumps(given)]
    book = write_play(tmp_path, ["data"])
    play(pair, book, *words)
    listed = pair.ssh(
        1, "cd /srv/tandem/data/small; find . -type f | wc -l; find . -type l | wc -l"
    )
    assert listed.split() == ["40", "0"]
    assert pair.ssh(1, "cat /srv/tandem/data/small/train/n2/3.jpg") == "train n2 3"
    texts = pair.ssh(1, "cd /srv/tandem/data/texts; cat deep/.a*; stat -c ' %s %b' holes.h5")
    assert texts == f"a {1 << 28} 0\n"
    # A first run finds what the role has listed, and reads only the times of folders.
    assert pair.ssh(1, "grep -l texts tandem/manifests/* | wc -l") == "1\n"
    assert changes(play(pair, book, *words)) == {"node1": 0}
    assert complaint(pair, tmp_path, "data", *words) == ""
    pair.ssh(1, "sudo mount -t tmpfs -o size=100k,mode=1777 none /mnt")
    small = json.dumps({**given, "data_root": "/mnt/data"})
    refused = play(pair, book, *words[:2], "-e", small, check=False)
    assert failures(refused) == {"node1"} and "the disk of /mnt/data has" in said(refused)
    assert pair.ssh(1, "find /mnt/data -type f; sudo umount /mnt") == ""
    # A copy that is interrupted in the second of three files goes on, if the disk holds three.
    (tmp_path / "data/parts").mkdir()
    for name in "abc":
        (tmp_path / "data/parts" / name).write_bytes(os.urandom(1 << 20))
    pair.ssh(1, "sudo mount -t tmpfs -o size=3500k,mode=1777 none /mnt")
    second = "find /mnt/data/parts -name '*b*' -size +0"
    kill = f"until {second} | grep -q b; do sleep 0.05; done; pkill -f 'rsync --server'"
    pair.ssh(1, f"({kill}) < /dev/null > /dev/null 2>&1 &")
    pair("shape", "8mbit", "1")
    sets = [{"name": "parts", "kind": "files"}]
    parts = json.dumps({**given, "data_root": "/mnt/data", "data_sets": sets})
    assert failures(play(pair, book, *words[:2], "-e", parts, check=False)) == {"node1"}
    assert changes(play(pair, book, *words[:2], "-e", parts)) == {"node1": 1}
    assert pair.ssh(1, "cat /mnt/data/parts/? | wc -c; sudo umount /mnt") == f"{3 << 20}\n"
    pair("shape", "1gbit", "1")
    (tmp_path / "full/train/n1/0.jpg").unlink()
    assert "differs from the control node's data/small" in complaint(pair, tmp_path, "data", *words)
    (root / "val/n4/gone.jpg").symlink_to("/mnt/gone.jpg")
    refused = play(pair, book, *words, check=False)
    assert failures(refused) == {"node1"} and "is a link that cannot be followed" in said(refused)
    (root / "val/n4/gone.jpg").unlink()
    pair.ssh(1, "echo 'echo Welcome' | cat - ~/.bashrc > new; mv new ~/.bashrc")
    refused = play(pair, book, *words, check=False)
    assert "line 1 of /home/tandem/.bashrc (echo Welcome) prints" in said(refused)
