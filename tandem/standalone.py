"""tandem/ as a script gets it: with the rules of contract/ inside, under a name of its own.

In the checkout these modules import `contract`. A script may have a contract.py itself, which
Python would find first; so what is sent along, or installed by pip, has a copy of contract/ as
`tandem.contract`, and every import of it says so. `python -m tandem.standalone FOLDER` writes it.
"""

import re
import sys
from pathlib import Path
from typing import Dict

ROOT = Path(__file__).resolve().parents[1]
RULES = "contract"
IMPORT = re.compile(rf"^(\s*from ){RULES}\b", re.MULTILINE)


def files() -> Dict[str, str]:
    """The text of each file, by its path relative to the folder that is to contain tandem/."""
    found = {}
    for room, into in (("tandem", "tandem"), (RULES, f"tandem/{RULES}")):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".json", ".typed") and path.name != Path(__file__).name:
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".py":
                    text = IMPORT.sub(rf"\1tandem.{RULES}", text)
                found[f"{into}/{path.relative_to(ROOT / room).as_posix()}"] = text
    return found


def write(folder: Path) -> None:
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
