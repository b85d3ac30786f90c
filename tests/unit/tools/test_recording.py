"""README's recording shows what a terminal showed."""

import sys
from xml.etree import ElementTree

from tools import recording

SHOWS = """
import sys, time
print('first \\x1b[32mgreen\\x1b[0m & <more>')
for part in ('10 %', '9 %'):
    sys.stdout.write('\\r\\x1b[K' + part); sys.stdout.flush(); time.sleep(0.3)
print('\\r\\x1b[Kdone'); print('x' * 85); sys.exit(3)
"""


def test_pictures_are_what_the_terminal_showed(tmp_path):
    argv = [sys.executable, "-c", SHOWS]
    pictures, code = recording.film(argv)
    assert code == 3
    # The command's own lines end with the one that begins so.
    shown = [lines[-lines[::-1].index("first green & <more>") - 1 :] for _, lines in pictures[1:]]
    assert shown[-1] == ("first green & <more>", "done", "x" * 80, "x" * 5, "")
    assert ("first green & <more>", "10 %") in shown
    (tmp_path / "film.svg").write_text(recording.svg(pictures))
    root = ElementTree.parse(tmp_path / "film.svg").getroot()
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"first green & <more>", "10 %", "done", "x" * 80} <= texts
