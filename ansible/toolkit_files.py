"""Download the files of the CUDA toolkit and of apex into bundle/, on the control node.

Roles cuda and apex run this program with their plan as JSON. It prints {"sha256": {file: checksum},
"trusted": sentences about new files without a published checksum}. A file that is in bundle/ is not
downloaded again. An error lists the files that a person has to download, with their pages.

Exit code 2: a file is missing, or is not the expected file.
"""

import argparse
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launcher/ is

from bundling import installers, manifest, wheels
from bundling.fetch import Progress
from contract.errors import UserError

ANSIBLE = Path(__file__).resolve().parent
BUNDLE = ANSIBLE.parent / "bundle"


def order(folder, components, bundle=BUNDLE):
    """Make the order for bundle/installers/`folder`; components: those of planning/toolkit.py."""
    files = tuple(
        installers.Installer(
            entry["file"], entry["url"], entry["page"], entry["sha256"], entry.get("commit", "")
        )
        for entry in components
    )
    return installers.Installers(files=files, folder=bundle / "installers" / folder)


def gather(plan, module, progress):
    """Fetch the files of an order, unless the folder is complete. Raises UserError."""
    if not manifest.is_complete(plan.folder, plan.purpose()):
        module.gather(plan, progress)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="in bundle/installers")
    parser.add_argument("parts", type=json.loads, help="the plan's parts, as JSON")
    parser.add_argument(
        "--tools-from", metavar="INDEX", help="also download the build tools of apex"
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--list", action="store_true", help="download nothing, list the files")
    args = parser.parse_args(argv)
    plan, progress = order(args.folder, args.parts, args.bundle), Progress()
    try:
        # Progress prints for people, but the role reads stdout as JSON.
        with redirect_stdout(io.StringIO()):
            if not args.list:
                gather(plan, installers, progress)
            if args.tools_from and not args.list:
                gather(wheels.plan_apex_tools(args.tools_from, args.bundle), wheels, progress)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    _, digests = manifest.read(plan.folder)
    print(json.dumps({"sha256": digests, "trusted": progress.trusted}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
