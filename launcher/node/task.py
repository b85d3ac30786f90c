"""What a guard is to do: the first line on its stdin, checked."""

import types

LEASE, BEAT = 16.0, 1.0
NEEDED = object()
# {field: (its type, its default)}
FIELDS = {
    "run": (str, NEEDED),
    "attempt": (int, NEEDED),
    "host": (str, NEEDED),
    "ranks": (list, NEEDED),  # global ranks of this node; the index is the local rank
    "argv": (list, NEEDED),
    "env": (dict, {}),  # the whole environment, besides what the guard adds
    "cwd": (str, "."),  # where launch starts
    "output": (str, NEEDED),  # the run directory on this node
    "data": (str, ""),  # where the images are; "" when unknown
    "lease": (float, LEASE),  # seconds of silence on stdin that end the run
    "beat": (float, BEAT),  # seconds between two `beat` frames
    "fail_grace": (float, 2.0),  # seconds the node's other workers get after the first failure
    "record": (bool, True),  # whether to record the machine, and to send records
    "holder": (str, "somebody"),  # who started the run, for others who ask
    "interface": (str, ""),  # whose counters are recorded; "": that of the default route
    "shared": (bool, False),  # start although another run has the machine
    "peers": (list, []),  # addresses of ranks, with which each is to connect; []: nobody looks
    "meet_within": (float, 60.0),  # seconds, after which `trouble` names ranks that have not
    "ask_after": (
        float,
        20.0,
    ),  # seconds of a rank's silence, after which it is asked for its stack
    "owner_signs": (list, []),  # of somebody's use of the machine (SIGNS in machines/owned.py)
    "away_dir": (str, ""),  # any file there is an owner's no (docs/office.md)
}


class BadTask(Exception):
    """The task cannot be carried out; the text says why, for a person."""


def read_task(line):
    """The FIELDS of a `start` line, by their names. Raises BadTask."""
    given = {name: line.get(name) for name in FIELDS}
    values = {
        name: default if given[name] is None else given[name]
        for name, (_, default) in FIELDS.items()
    }
    missing = [name for name, value in values.items() if value is NEEDED]
    if line.get("type") != "start" or missing:
        raise BadTask("the task for the guard lacks {}".format(", ".join(missing) or "its type"))
    for name, (kind, _) in FIELDS.items():
        if kind is float and isinstance(values[name], int):
            values[name] = float(values[name])
        if not isinstance(values[name], kind):
            raise BadTask("{} in the task for the guard is {!r}".format(name, values[name]))
    texts = values["argv"] + list(values["env"]) + list(values["env"].values())
    if not values["argv"] or not all(isinstance(text, str) for text in texts):
        raise BadTask("argv and env in the task for the guard must be texts, and argv not empty")
    return types.SimpleNamespace(**values)
