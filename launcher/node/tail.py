"""Sends what grows in the files of a run on this node, so that the control machine's copies grow
with them: a little a second, and nothing that anybody waits for. What is missing at the end is
fetched from where the copy ends (launcher/collect.py)."""

import os

PIECE = 1 << 15  # bytes of a file in one turn; a line that is longer comes in several
LAST = 1 << 18  # bytes of all files after the last process has ended
BEHIND = 1 << 16  # bytes that wait for the reader: then nothing is added


class Tail:
    """The record files of one attempt, by name."""

    def __init__(self, folder, task):
        self.folder = folder
        names = ["machine.{}.jsonl".format(task.attempt)]
        names += ["rank{}.{}.steps.jsonl".format(rank, task.attempt) for rank in task.ranks]
        self.sent = dict.fromkeys(names, 0)  # bytes

    def send(self, frames):
        """The next piece of each file, unless the reader is behind. Returns the bytes of all."""
        total = 0
        for name, offset in self.sent.items():
            if frames.size > BEHIND:
                break
            piece = self.read(name, offset)
            if piece:
                frames.send("record", piece, file=name, offset=offset)
                self.sent[name] += len(piece)
                total += len(piece)
        return total

    def rest(self, frames):
        """What is left, as far as it goes quickly."""
        total = 0
        while total < LAST:
            sent = self.send(frames)
            if not sent:
                return
            total += sent

    def read(self, name, offset):
        """Whole lines from there on; b"" where there are none."""
        try:
            # What is no file there must not hold up the guard.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(str(self.folder / name), flags)
        except OSError:  # not there yet, or the disk fails, which its rank says
            return b""
        try:
            piece = os.pread(descriptor, PIECE, offset)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
        end = piece.rfind(b"\n") + 1
        return piece[:end] if end or len(piece) < PIECE else piece
