"""Says, while a run goes on, which wait rules it, once a kind, when it has for a minute; and where
it hangs, which rank the others wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from contract.errors import UserError
from contract.text import seconds
from report.bottleneck import step_shares
from report.hang import SHUTDOWN, Hang, Standing, by_place, finished_text, standings
from report.status import Follower, Judgement
from report.verdict import wait_words
from report.wait_rules import WORDS

LOOK_EVERY = 5.0  # seconds
LAST_LOOK = 5.0  # seconds that the end of a run waits for the last one
# Two looks so far apart share few steps (report.status.RECENT); they have to agree.
APART = 45.0
STEADY = 0.1  # of its share by which a wait may differ between them


class Ruling:
    """Reads the run's folder in a thread of its own: whatever machines write there, the loop that
    renews leases never waits for it."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._follower, self._say = Follower(folder), say
        self._told: set[str] = set()
        self._since: tuple[float, str, float] | None = None  # when first seen, kind, share
        self.hang: Hang | None = None  # as it was seen last
        self._places: set[str] = set()  # where ranks were said to stand in the present hang
        self._step: int | None = None  # after which it hangs
        self._stood: Sequence[Standing] = ()  # where ranks stood at the last look
        self._before_stop: Sequence[Standing] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="ruling")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LAST_LOOK)  # what guards asked as the run ended is to be seen

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(LOOK_EVERY)
            try:
                progress = self._follower.look()
            except (UserError, OSError):
                continue
            except Exception as error:  # of a record that no reader foresaw: the run goes on
                self._say(f"what holds the run up cannot be said: {type(error).__name__}: {error}")
                return
            if progress is not None:
                self._stood = progress.stands
            if progress is not None and not over:
                self.judge(time.monotonic(), None if progress.hang else progress.judgement)
                self.note(progress.hang, progress.step, progress.leaving)
                # Where steps only take long, nobody has to know where.
                is_stuck = progress.hang or progress.finished
                stuck = [one for one in progress.stands if is_stuck or one.place == SHUTDOWN]
                self.note_places(stuck, progress.finished)

    def judge(self, now: float, ruling: Judgement | None) -> None:
        """Say what rules if it did APART seconds ago, too."""
        kind = ruling.kind if ruling is not None and ruling.recent else None
        if ruling is None or kind not in WORDS or kind in self._told:
            self._since = None
            return
        share = step_shares(ruling.step)[kind]
        since, before, first = self._since or (now, kind, share)
        if before != kind or abs(share - first) > STEADY * first:
            since, first = now, share
        self._since = since, kind, first
        if now - since >= APART:
            self._told.add(kind)
            of = wait_words(ruling.step, kind)
            wait = WORDS[kind].format(ruling.step.samples)
            self._say(f"{wait}: {of}; `make report` says what to do")

    def note_stop(self) -> None:
        """The ranks are about to be told to stop. One that the others wait for may do so, as from a
        read that takes forever, and is then no longer among those that stand."""
        self._before_stop = self._stood

    def standings(self, attempt: int) -> Sequence[Standing]:
        """Where the ranks of an attempt stood before they were stopped; else those that were silent
        when they were asked last."""
        return self._before_stop or standings(self._follower.machines.values(), attempt)

    def note_places(
        self, stands: Sequence[Standing], finished: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Say where ranks stand, once each place in a hang. `finished` ranks have ended."""
        for place, line in by_place(stands).items():
            if place not in self._places:
                self._places.add(place)
                self._say(f"{finished_text(finished)}; {line}" if finished else line)

    def note(self, hang: Hang | None, step: int | None, leaving: bool) -> None:
        """Say that it hangs, again where other ranks are waited for, and that steps come again.
        `leaving`: a rank has ended its records, its last steps among them, and not yet its process:
        what it waited for until then stays known."""
        if leaving:
            return
        before, self.hang = self.hang, hang
        if hang is not None and (before is None or hang.ranks != before.ranks):
            self._step = step
            self._say(hang.sentence)
        if hang is None and before is not None and step != self._step:
            self._places.clear()
            self._say(f"steps come again, after more than {seconds(before.seconds)} without one")
