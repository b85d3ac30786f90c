"""Reports during a run which wait dominates its steps, and which rank holds up a run that hangs.

watch.py runs a Ruling during an attempt, and asks it at the end where silent ranks stood. The
report package reads the records and judges them; here a judgement becomes a line on the terminal.
"""

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

# Durations are in seconds.
LOOK_EVERY = 5.0
LAST_LOOK = 5.0  # the end of an attempt waits no longer for the last look
# A wait is reported if it still dominates after this time. Looks that far apart have few steps in
# common (report.status.RECENT).
REPORT_AFTER = 45.0
SHARE_TOLERANCE = 0.1  # the relative change of the wait's share of a step that is allowed meanwhile


class Ruling:
    """Reads the run's records in a thread of its own, so that the event loop, which renews leases,
    never waits for files."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._follower, self._say = Follower(folder), say
        self._reported_kinds: set[str] = set()
        # The wait that dominates at present: (when it was first seen, its kind, its share then).
        self._dominant: tuple[float, str, float] | None = None
        self.hang: Hang | None = None  # at the last look
        self._reported_places: set[str] = set()  # of ranks in the present hang
        self._hang_step: int | None = None  # the last step before the present hang
        self._standings: Sequence[Standing] = ()  # of silent ranks, at the last look
        self._standings_before_stop: Sequence[Standing] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="ruling")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # The last look reads the places of ranks that guards asked shortly before the end.
        self._over.set()
        self._thread.join(LAST_LOOK)

    def _work(self) -> None:
        """Look every LOOK_EVERY seconds and report, and look once more at the end."""
        is_over = False
        while not is_over:
            is_over = self._over.wait(LOOK_EVERY)
            try:
                progress = self._follower.look()
            except (UserError, OSError):
                continue
            except Exception as error:  # a defect here, or an odd record, must not end the run
                self._say(f"the cause of the delay is unknown: {type(error).__name__}: {error}")
                return
            if progress is not None:
                self._standings = progress.stands
            if progress is not None and not is_over:
                self.report_wait(time.monotonic(), None if progress.hang else progress.judgement)
                self.report_hang(progress.hang, progress.step, progress.leaving)
                # `silent` has a line for each place in the code at which silent ranks stand. While
                # steps are only slow, these lines are not needed. Each is reported once in a hang.
                is_stuck = progress.hang or progress.finished
                for place, line in progress.silent.items():
                    if place not in self._reported_places and (is_stuck or place == SHUTDOWN):
                        self._reported_places.add(place)
                        finished = progress.finished
                        self._say(f"{finished_text(finished)}; {line}" if finished else line)

    def report_wait(self, now_seconds: float, judgement: Judgement | None) -> None:
        """Report the dominant wait, once for each kind, if it has dominated for REPORT_AFTER."""
        kind = judgement.kind if judgement is not None and judgement.recent else None
        if judgement is None or kind not in WORDS or kind in self._reported_kinds:
            self._dominant = None
            return
        share = step_shares(judgement.step)[kind]
        start_seconds, previous_kind, first_share = self._dominant or (now_seconds, kind, share)
        # If the kind or its share has changed, this time begins again.
        if previous_kind != kind or abs(share - first_share) > SHARE_TOLERANCE * first_share:
            start_seconds, first_share = now_seconds, share
        self._dominant = start_seconds, kind, first_share
        if now_seconds - start_seconds >= REPORT_AFTER:
            self._reported_kinds.add(kind)
            share_text = wait_words(judgement.step, kind)
            wait = WORDS[kind].format(judgement.step.samples)
            self._say(f"{wait}: {share_text}; `make report` says what to do")

    def note_stop(self) -> None:
        """Keep where the silent ranks stand, before they are stopped."""
        # Even the rank that holds up all ranks may obey the stop, for example by ending a read that
        # hangs. Afterwards its records no longer say where it stood.
        self._standings_before_stop = self._standings

    def standings(self, attempt: int) -> Sequence[Standing]:
        """Return where the silent ranks of an attempt stood before the stop, sorted by rank."""
        # A rank's answer may have arrived after the last look before the stop.
        newest = standings(self._follower.machines.values(), attempt)
        by_rank = {s.rank: s for s in [*newest, *self._standings_before_stop]}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def report_hang(self, hang: Hang | None, step: int | None, leaving: bool) -> None:
        """Report a hang when it begins and when the run waits for different ranks, and report when
        steps continue. `step`: the newest step; `leaving`: a rank has closed its records, but its
        process still runs."""
        # A rank that gives up records its last steps all at once. These steps do not mean that the
        # run continues, so the hang remains as it was.
        if leaving:
            return
        previous_hang, self.hang = self.hang, hang
        if hang is not None and (previous_hang is None or hang.ranks != previous_hang.ranks):
            self._hang_step = step
            self._say(hang.sentence)
        if hang is None and previous_hang is not None and step != self._hang_step:
            self._reported_places.clear()
            pause = seconds(previous_hang.seconds)
            self._say(f"steps continue, after more than {pause} without a step")
