"""How much of a run is kept on the control machine: a node or a rank that writes without end must
not fill that machine's disk."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from contract.errors import UserError

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The most MiB of one file. Checkpoints have no such limit: they may fill the free disk."""

    log: int = 256  # what a rank prints, and controller.log
    steps: int = 1024  # rank<k>.steps.jsonl
    samples: int = 4096  # samples/rank<k>.<attempt>.csv
    # Any other record of a node. 90 epochs of ImageNet over 1 Gbit/s take a week, in which a disk
    # makes 390 bytes a second (iostat.json), a network card 190 and a GPU 150.
    other: int = 1024

    @classmethod
    def of(cls, text: str | None) -> Sizes:
        """From words such as `log=512,steps=2048`; what is not named keeps its default. Raises
        UserError."""
        chosen = cls()
        names = [field.name for field in fields(cls)]
        for word in filter(None, (text or "").split(",")):
            name, _, value = word.partition("=")
            if name not in names or not value.isascii() or not value.isdigit() or int(value) < 1:
                raise UserError(
                    f"KEEP={text}: {word!r} is none of {', '.join(names)} with a number of MiB, "
                    "as in KEEP=log=512,steps=2048."
                )
            chosen = replace(chosen, **{name: int(value)})
        return chosen
