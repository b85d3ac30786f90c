"""Makes the folder that a user's script runs in, then becomes what is to run there:
python -m launcher.node.script FROM FOLDER COMMAND...

Each run has a folder of its own: what the script writes beside its code must neither change the
code that other runs compare, nor be lost when that is sent anew. A later attempt of the run finds
what earlier ones wrote.
"""

import os
import pathlib
import shutil
import sys


def copy(sent, folder):
    """Copy all files below `sent` into `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(sent.rglob("*")):
        target = folder / path.relative_to(sent)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            shutil.copy2(str(path), str(target))


def main(argv):
    """An exit code; none where the folder was made."""
    folder = pathlib.Path(argv[1])
    try:
        copy(pathlib.Path(argv[0]), folder)
    except OSError as error:
        print("the folder of the script cannot be made: {}".format(error), file=sys.stderr)
        return 1
    os.chdir(str(folder))
    os.execv(argv[2], argv[2:])  # noqa: S606 (no shell is what is wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
