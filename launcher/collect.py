"""Brings a run's files from the nodes to the control machine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.code import ssh_command
from launcher.errors import UserError
from launcher.inventory import Host
from launcher.plan import NodePlan
from launcher.probe import talk

CHECKPOINT = re.compile(r"step-(\d+)\.pt$")
LIST_SECONDS = 20.0


def records(parts: list[NodePlan], hosts: dict[str, Host], folder: Path) -> list[str]:
    """Copy nodes/ and samples/ of every machine that answers; a sentence for each that does not."""

    def one(node: NodePlan) -> str | None:
        for part in ("nodes", "samples"):
            problem = fetch(hosts[node.host], f"{node.output}/{part}", folder / part)
            if problem:
                return problem
        return None

    with ThreadPoolExecutor(max_workers=8) as pool:
        return [problem for problem in pool.map(one, parts) if problem]


def checkpoints(nodes: dict, parts: list[NodePlan]) -> dict[str, list[str]]:
    """The names of the checkpoints that each machine holds."""
    found = {}
    for node in parts:
        if node.host not in nodes:
            continue
        try:
            process = nodes[node.host].start(["ls", "-1", f"{node.output}/checkpoints/{node.host}"])
            output, _, status = talk(process, b"", LIST_SECONDS)
        except (OSError, UserError):  # it froze or went away: others hold the same
            continue
        if status == 0:
            found[node.host] = output.decode().split()
    return found


def newest(names: list[str]) -> tuple[int, str] | None:
    """Step and name of the last checkpoint among file names."""
    steps = [(int(match[1]), name) for name in names if (match := CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)


def best_and_last(
    nodes: dict, parts: list[NodePlan], hosts: dict[str, Host], folder: Path
) -> tuple[list[Path], list[str]]:
    """Copy the best and the newest checkpoint from the first machine that has the newest one."""
    held = checkpoints(nodes, parts)
    tips = {host: tip for host, names in held.items() if (tip := newest(names))}
    if not tips:
        return [], []
    host = max(tips, key=lambda name: tips[name][0])
    output = next(node.output for node in parts if node.host == host)
    names = [tips[host][1]] + (["best.pt"] if "best.pt" in held[host] else [])
    target = folder / "checkpoints" / host
    problems = []
    for name in names:
        problem = fetch(hosts[host], f"{output}/checkpoints/{host}/{name}", target / name)
        problems += [problem] if problem else []
    return [target / name for name in names if (target / name).exists()], problems


def fetch(host: Host, source: str, target: Path) -> str | None:
    """Copy a file or a folder to `target`, which has its name; what is not there is not copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if host.is_local:
        return _copy(Path(source), target)
    address = f"[{host.address}]" if ":" in host.address else host.address
    argv = ["rsync", "--recursive", "--links", "--times", "--ignore-missing-args", "--timeout=60"]
    argv += [f"--rsh={shlex.join(ssh_command(host))}", f"{address}:{source}", f"{target.parent}/"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300]
        return f"{host.label()}: {source} could not be copied here: {said}"
    return None


def _copy(source: Path, target: Path) -> str | None:
    if not source.exists():
        return None
    try:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    except (OSError, shutil.Error) as error:
        return f"{source} could not be copied to {target}: {error}"
    return None
