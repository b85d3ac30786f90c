"""Reports during a run which wait dominates its steps, and for which rank the others wait if the
run hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from contract.errors import UserError
from contract.text import seconds
from report.bottleneck import step_shares
from report.hang import SHUTDOWN, Hang, Standing, finished_text, standings
from report.status import Follower, Judgement
from report.verdict import wait_words
from report.wait_rules import WORDS

LOOK_EVERY = 5.0  # seconds
LAST_LOOK = 5.0  # seconds that the end of a run waits for the last look
# Seconds between two looks that have to agree: they share few steps (report.status.RECENT).
APART = 45.0
STEADY = 0.1  # relative difference of a wait's share that these looks may have


class Ruling:
    """Reads the run's folder in a separate thread. The loop that renews leases never waits for the
    files that machines wrote."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._follower, self._say = Follower(folder), say
        self._reported_kinds: set[str] = set()
        self._since: tuple[float, str, float] | None = None  # when first seen, kind, share
        self.hang: Hang | None = None  # as of the last look
        self._reported_places: set[str] = set()  # of ranks in the present hang
        self._hang_step: int | None = None  # the last step before it
        self._standings: Sequence[Standing] = ()  # at the last look
        self._standings_before_stop: Sequence[Standing] = ()
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
                self._say(f"the cause of the delay is unknown: {type(error).__name__}: {error}")
                return
            if progress is not None:
                self._standings = progress.stands
            if progress is not None and not over:
                self.judge(time.monotonic(), None if progress.hang else progress.judgement)
                self.note(progress.hang, progress.step, progress.leaving)
                # While steps only take long, nobody needs the places.
                is_stuck = progress.hang or progress.finished
                # Report each place and each sum once in a hang.
                for place, line in progress.silent.items():
                    if place not in self._reported_places and (is_stuck or place == SHUTDOWN):
                        self._reported_places.add(place)
                        finished = progress.finished
                        self._say(f"{finished_text(finished)}; {line}" if finished else line)

    def judge(self, now: float, ruling: Judgement | None) -> None:
        """Report the wait that dominates, once for each kind, if it did APART seconds ago, too."""
        kind = ruling.kind if ruling is not None and ruling.recent else None
        if ruling is None or kind not in WORDS or kind in self._reported_kinds:
            self._since = None
            return
        share = step_shares(ruling.step)[kind]
        since, kind_before, first_share = self._since or (now, kind, share)
        # Another wait, or one that grows or shrinks, has to last from now on.
        if kind_before != kind or abs(share - first_share) > STEADY * first_share:
            since, first_share = now, share
        self._since = since, kind, first_share
        if now - since >= APART:
            self._reported_kinds.add(kind)
            share_text = wait_words(ruling.step, kind)
            wait = WORDS[kind].format(ruling.step.samples)
            self._say(f"{wait}: {share_text}; `make report` says what to do")

    def note_stop(self) -> None:
        """Keep where the ranks stand: they are about to be stopped."""
        # A rank for which the others wait may stop, too, as from a read that takes forever. Then it
        # no longer stands anywhere.
        self._standings_before_stop = self._standings

    def standings(self, attempt: int) -> Sequence[Standing]:
        """Return where the silent ranks of an attempt stood before they were stopped, by rank."""
        # The answer of a rank may have arrived since the last look before the stop.
        newest = standings(self._follower.machines.values(), attempt)
        by_rank = {s.rank: s for s in [*newest, *self._standings_before_stop]}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def note(self, hang: Hang | None, step: int | None, leaving: bool) -> None:
        """Report that the run hangs, again if it waits for other ranks, and that steps come again.
        `step`: the newest; `leaving`: a rank has ended its records, and not yet its process."""
        # The last steps of a rank that leaves are recorded at once: for what it waited until then
        # stays known.
        if leaving:
            return
        before, self.hang = self.hang, hang
        if hang is not None and (before is None or hang.ranks != before.ranks):
            self._hang_step = step
            self._say(hang.sentence)
        if hang is None and before is not None and step != self._hang_step:
            self._reported_places.clear()
            self._say(f"steps continue, after more than {seconds(before.seconds)} without a step")
