"""Write tandem/ as a script gets it: with a copy of contract/ inside, as `tandem.contract`.

In the checkout these modules import `contract`. A script may have its own contract.py, which Python
would find first. The package that is sent along, or installed by pip, therefore imports
`tandem.contract`. `python -m tandem.standalone FOLDER` writes it.
"""

import re
import sys
from pathlib import Path
from typing import Dict

ROOT = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^(\s*from )contract\b", re.MULTILINE)


def files() -> Dict[str, str]:
    """Return the text of each file, by its path relative to the folder that contains tandem/."""
    texts = {}
    for package, target in (("tandem", "tandem"), ("contract", "tandem/contract")):
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".json", ".typed") and path.name != Path(__file__).name:
                text = path.read_text(encoding="utf-8")
                # The package must contain no import of the script's modules.
                if path.suffix == ".py":
                    text = IMPORT.sub(r"\1tandem.contract", text)
                texts[f"{target}/{path.relative_to(ROOT / package).as_posix()}"] = text
    return texts


def write(folder: Path) -> None:
    """Write all files below a folder."""
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
