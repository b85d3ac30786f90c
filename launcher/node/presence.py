"""Who trains on a machine, for whoever asks next: a name that the kernel takes back by itself."""

import os
import re
import socket

LONGEST = 107  # bytes of a name, the leading NUL apart


def claim(run, holder):
    """A socket whose abstract name says run and holder while this process lives.

    /proc/net/unix shows it to every user of the machine (launcher/node/probe.py reads it there).
    """
    words = [re.sub(r"[^\w@.+-]", "-", word, flags=re.ASCII) for word in (run, holder)]
    name = "/".join(["tandem", str(os.getpid()), *words])
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mark.bind("\0" + name[:LONGEST])
    return mark
