"""Download into bundle/ the files that machines without internet need, or check them.

ansible/playbooks/bundle.yml runs this program for `make bundle`, and role bundle runs it with
--verify before it changes any machine. The modules of bundling/ each fetch one kind of files. The
same command continues after an interruption.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from bundling import debs, fetch, installers, manifest, wheels
from contract import interrupts
from contract.errors import UserError

BUNDLE = Path(__file__).resolve().parents[1] / "bundle"
# The module that fetches each kind of order.
MODULES = {wheels.Wheels: wheels, debs.Debs: debs, installers.Installers: installers}


def plan(needs, bundle):
    """Plan the orders, one for each folder of the bundle. Raises UserError.

    needs: {"wheels": [[stack, Python or ""], ...], "releases": {code name: [further packages]},
    "stacks": [names of stacks whose installers are needed], "toolkit", "apex" and "driver_version":
    as in group_vars, "conda": [URL, SHA-256] or [], "index_url": pip's index, "mirrors": {name in
    releases.yml: URL}}. planning/offline.py makes the first three and decides about conda.
    """
    index_url = needs["index_url"]
    orders = [wheels.plan(stack, python, index_url, bundle) for stack, python in needs["wheels"]]
    packages = debs.role_packages()
    orders += [
        debs.plan(release, packages | set(extra_packages), needs["mirrors"], bundle)
        for release, extra_packages in needs["releases"].items()
    ]
    # Installers come last, since their download stops at files that a person has to download.
    for stack in needs["stacks"]:
        orders += installers.plan(stack, needs, bundle)
    if any(order.folder.name.startswith("apex-") for order in orders):
        orders.insert(0, wheels.plan_apex_tools(index_url, bundle))
    if needs["conda"]:
        orders.append(installers.plan_conda(*needs["conda"], bundle))
    return list(dict.fromkeys(orders))


def gather(orders, progress):
    """Fetch the incomplete orders. Returns true if an order was incomplete. Raises UserError."""
    todo = [order for order in orders if not manifest.is_complete(order.folder, order.purpose())]
    for order in todo:
        progress.begin(order.folder.name)
        MODULES[type(order)].gather(order, progress)
    return bool(todo)


def verify(orders):
    """Return a sentence for each missing or broken file."""
    problems = (manifest.problems(order.folder, order.purpose()) for order in orders)
    return [sentence for sentences in problems for sentence in sentences]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wanted", type=json.loads, help="what is needed, as JSON: see plan()")
    parser.add_argument("--verify", action="store_true", help="download nothing: check every file")
    parser.add_argument(
        "--terminal", default="", help="where to show the bar, for example /dev/pts/1"
    )
    args = parser.parse_args(argv)
    try:
        orders = plan(args.wanted, BUNDLE)
        if args.verify:
            problems = verify(orders)
            print("\n".join(problems))
            return 1 if problems else 0
        changed = gather(orders, fetch.Progress(args.terminal))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    # The last lines list all folders, also those that were complete before.
    for order in orders:
        size = sum(path.stat().st_size for path in order.folder.iterdir())
        print(f"{order.folder}: {size / 1e9:.1f} GB, complete{'' if changed else ' already'}")
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.run_main(main))
