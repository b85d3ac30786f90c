"""What a machine does before a launch, which it then becomes:
python -m launcher.node.prepare folder FROM FOLDER OUTPUT... -- COMMAND...
python -m launcher.node.prepare links RESULT COMMAND...
"""

import json
import os
import pathlib
import shutil
import sys

from launcher.node import pairprobe


def copy(sent, folder):
    """Make the folder that a user's script runs in, with all files below `sent`. Raises OSError.

    Each run has one of its own: what the script writes beside its code must neither change the code
    that other runs compare, nor be lost when that is sent anew. A later attempt of the run finds
    what earlier ones wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(sent.rglob("*")):
        target = folder / path.relative_to(sent)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            shutil.copy2(str(path), str(target))


def measure(result):
    """Measure this machine's links by the timetable in TANDEM_LINKS: it holds the token by which
    the machines know each other, and other users may read a command line. Returns what failed."""
    figures = pairprobe.main(json.loads(os.environ.pop("TANDEM_LINKS")))
    pairs = list(figures["pairs"].items())
    pairs.append(("the machine before it in the ring", figures["ring"]))
    failed = ["{}: {}".format(peer, one["error"]) for peer, one in pairs if "error" in one]
    if not failed:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(figures) + "\n")
    return ", ".join(failed)


def main(argv):
    """An exit code; none where the machine is prepared."""
    if argv[0] == "links":
        failed, command = measure(pathlib.Path(argv[1])), argv[2:]
        if failed:
            print("the link could not be measured with " + failed, file=sys.stderr)
            return 1
    else:
        end = argv.index("--")  # what follows may have more of them
        folder, command = pathlib.Path(argv[2]), argv[end + 1 :]
        try:
            copy(pathlib.Path(argv[1]), folder)
            for output in argv[3:end]:  # not every script makes the folder that it saves in
                (folder / output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print("the folder of the script cannot be made: {}".format(error), file=sys.stderr)
            return 1
        os.chdir(str(folder))
    os.execv(command[0], command)  # noqa: S606 (no shell is what is wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
