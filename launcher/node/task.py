"""What a guard is to do: the first line on its stdin, checked."""

import typing

Task = typing.NamedTuple(
    "Task",
    [
        ("run", str),
        ("attempt", int),
        ("host", str),
        ("ranks", list),  # global ranks of this node; the index is the local rank
        ("argv", list),
        ("env", dict),  # the whole environment, besides what the guard adds
        ("cwd", str),  # where launch starts
        ("output", str),  # the run directory on this node
        ("data", str),  # where the images are; "" when unknown
        ("lease", float),  # seconds of silence on stdin that end the run
        ("beat", float),  # seconds between two `beat` frames
        ("fail_grace", float),  # seconds the node's other workers get after the first failure
        ("record", bool),  # whether to record the machine, and to send records
        ("holder", str),  # who started the run, for others who ask
        ("interface", str),  # whose counters are recorded; "": that of the default route
        ("shared", bool),  # start although another run has the machine
        ("port", int),  # at which ranks are expected to meet; 0: nobody looks whether they do
        ("meet_within", float),  # seconds, after which a `trouble` frame names ranks that have not
        ("owner_signs", list),  # of somebody's use of the machine (SIGNS in machines/owned.py)
        ("away_dir", str),  # any file there is an owner's no (docs/office.md)
    ],
)

REQUIRED = ("run", "attempt", "host", "ranks", "argv", "output")
DEFAULTS = {
    "env": {},
    "cwd": ".",
    "data": "",
    "lease": 16.0,
    "beat": 1.0,
    "fail_grace": 2.0,
    "record": True,
    "holder": "somebody",
    "interface": "",
    "shared": False,
    "port": 0,
    "meet_within": 60.0,
    "owner_signs": [],
    "away_dir": "",
}


class BadTask(Exception):
    """The task cannot be carried out; the text says why, for a person."""


def read_task(line):
    """The Task in a `start` line. Raises BadTask."""
    missing = [name for name in REQUIRED if name not in line]
    if line.get("type") != "start" or missing:
        raise BadTask("the task for the guard lacks {}".format(", ".join(missing) or "its type"))
    values = dict(DEFAULTS)
    values.update({name: line[name] for name in Task._fields if line.get(name) is not None})
    for name, kind in typing.get_type_hints(Task).items():
        if kind is float and isinstance(values[name], int):
            values[name] = float(values[name])
        if not isinstance(values[name], kind):
            raise BadTask("{} in the task for the guard is {!r}".format(name, values[name]))
    texts = values["argv"] + list(values["env"]) + list(values["env"].values())
    if not values["argv"] or not all(isinstance(text, str) for text in texts):
        raise BadTask("argv and env in the task for the guard must be texts, and argv not empty")
    return Task(**values)
