"""How modules that root runs stay out of what others may change. Python >= 3.6, standard library.

Whoever may change a folder decides by a link where a path through it leads. So root goes only as
far as it alone decides that, and from there on the user acts to whom the rest belongs.
"""

import os
import pwd
from contextlib import contextmanager

LINKS_MAX = 40  # as in Linux's own path walk


@contextmanager
def acting_as(uid, gid, name=None):
    """Carries out the block with this user's permissions. Anybody but root stays who he is."""
    if os.geteuid() or not uid:
        yield
        return
    groups = os.getgroups()
    if name is None:
        os.setgroups([gid])
    else:
        os.initgroups(name, gid)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def is_roots_alone(folder):
    """Return true if only root may change a folder's files. An ACL shows in the group's bits."""
    entry = os.stat(folder)
    return not entry.st_uid and not entry.st_mode & 0o022


def as_far_as_root(path):
    """(folder, rest) of an absolute path: the folder has no link in its path, and root alone may
    change all folders above it. The rest is what others may change, or what does not exist."""
    folder, parts, links = "/", path.split("/")[::-1], 0
    while parts and is_roots_alone(folder):
        name = parts.pop()
        child = os.path.normpath(os.path.join(folder, name))
        if os.path.islink(child):
            links += 1
            if links > LINKS_MAX:
                raise OSError("too many levels of symbolic links: " + path)
            target = os.readlink(child)
            parts += target.split("/")[::-1]
            folder = "/" if target.startswith("/") else folder
        elif os.path.exists(child):
            folder = child
        else:
            parts.append(name)
            break
    return folder, "/".join(parts[::-1])


def name_of(uid):
    """Look up the user's name; None if this machine has none for the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
