"""A training run from beginning to end: build, loop, evaluate, save."""

import contextlib
import logging
import math
import pathlib
import time
from typing import Any, Dict, List, Optional, Tuple

import torch

from contract.errors import STOPPED, UserError
from contract.options import Options
from contract.split import rank_slice
from tandem.clock import Clock
from tandem.process_facts import peak_memory_bytes
from tandem.step_lines import Lines

from . import checkpoint, finite, parallel, resume, weights
from .banner import describe_run, start_line
from .build import build_job, build_materials
from .data.batch import Batch
from .data.loader import Generated, GeneratedBatches, SampleLog, TrainBatches
from .errors import Diverged
from .evaluate import Unevaluated, evaluate, share_buffers
from .memory import OutOfMemory, one_pass
from .models import describe
from .optim import learning_rate
from .screen import Screen
from .step import agree_micro_batches, rebuild_buckets, train_step
from .stop import Stop
from .world import World
from .writer import Writer

log = logging.getLogger(__name__)


def train(run: "Run") -> int:
    """Train as the run's options say; returns the exit code. Raises UserError for bad input."""
    try:
        finished = run.all_epochs()
        run.clock.enter("checkpoint")
        for writer in filter(None, (run.writer, run.own_writer)):
            writer.finish()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a broken device cannot be read any more
            run.end("failed")
        for writer in filter(None, (run.writer, run.own_writer)):
            with contextlib.suppress(UserError):
                writer.finish()  # the process may leave without waiting for its threads
        raise
    run.end("finished" if finished else "stopped")
    return 0 if finished else STOPPED


class Run:
    """One attempt at a run: the job, its position, and where its figures go."""

    def __init__(self, options: Options, world: World) -> None:
        parts = build_materials(options, world)
        self.clock = Clock(world.device)
        # Before anything is cast or wrapped: apex would remember this forward's cast weights.
        self.cost = describe(parts.model, parts.image_size)
        self.job = build_job(options, world, parts, self.clock)
        self.options, self.world = options, world
        with world.raise_on_all_ranks():
            self.lines = Lines(options.output, world.host, world.rank, self.clock)
            self.screen = Screen(options, world, self.job.steps_per_epoch, self.lines)
            self.sample_log = SampleLog(options, world)
        self.batches = TrainBatches(parts.train_set, options, world)
        self.stop = Stop(world)
        folder = pathlib.Path(options.output or ".", "checkpoints", world.host)
        saves = bool(options.output) and world.local_rank == 0
        self.writer: Optional[Writer] = Writer(folder, options.keep) if saves else None
        # For the state that the strategy keeps for this machine; only its first rank writes it.
        own = folder / f"rank{world.rank}"
        self.own_writer: Optional[Writer] = Writer(own, options.keep) if options.output else None
        self.tallies: List[Tuple[int, torch.Tensor]] = []  # each with its step
        self.tally_samples = 0
        self.losses = finite.Losses(options.nonfinite_steps)
        self.evaluates = True  # to a finite loss, when it was last evaluated
        self.due = False  # a checkpoint, as --checkpoint_every says
        self.in_warm_up = False  # whether the last step was an exact one of the warm-up
        self.epoch_sums = [0.0, 0.0, 0]  # loss, hits and samples of this rank, epoch and attempt
        agree_micro_batches(self.job)
        parallel.check_micro_batches(options, world, self.job.micro_batches)
        rebuild_buckets(self.job)
        if self.job.attached is not None:
            self.job.attached.say = self.screen.say
        self.clock.restart()
        self._find_position()

    def _find_position(self) -> None:
        """Begin anew, from given weights, or where a checkpoint ended; say which."""
        self.clock.enter("checkpoint")
        state = resume.find(self.job)
        self.position = checkpoint.new_run(self.job)
        if state is None and self.options.weights is not None:
            weights.start_from_weights(self.job)
        if state is not None:
            self.position = checkpoint.restore(self.job, state)
            missing = not resume.restore_own(self.job, self.position)
            changed = resume.epochs_changed(self.job, state)
            if self.job.attached is not None:
                images = len(self.job.train_set)
                seen = self.position.samples(images)
                self.job.attached.steps = seen * self.job.steps_per_epoch // images
        self.clock.enter("other")
        self._report_start(state is not None)
        if state is not None and changed:
            self.screen.say(changed)
        if state is not None and missing:
            self.screen.say(resume.OWN_STATE_LOST.format(self.job.options.sync))
        if state is not None and resume.common_state_is_lost(self.job, state):
            self.screen.say(resume.COMMON_STATE_LOST.format(self.job.options.sync))

    def all_epochs(self) -> bool:
        """Train from the position to the end; False when stopped before the end."""
        while self.position.epoch < self.options.epochs:
            if not self.epoch():
                self.save(best=False)
                return False
            completed = self.position.epoch  # epochs completed
            last = completed == self.options.epochs
            best = (last or completed % self.options.evaluate_every == 0) and self.evaluate()
            if last or best or self.due or self.options.checkpoint_every == 0:
                self.save(best)
        if not self.evaluates:  # the model that the run ends with
            causes = "; ".join(finite.causes(self.options))
            raise Diverged(f"{finite.EVALUATION.format(self.position.epoch)}. Likely: {causes}.")
        return True

    def epoch(self) -> bool:
        """Train from the position to the epoch's end; False when asked to stop."""
        at, job = self.position, self.job
        self.epoch_sums = [0.0, 0.0, 0]
        self.screen.epoch(at.epoch, round(at.sample / len(job.train_set) * job.steps_per_epoch))
        self.clock.enter("data")
        for batch in self.batches.epoch(at.epoch, at.sample):
            if self.stop.now():
                return False
            self._step(batch)
            interval = self.options.checkpoint_every
            self.due |= interval > 0 and at.step % interval == 0
            if self.due and at.sample < len(job.train_set):
                self.save(best=False)
            self.clock.enter("data")
        self.clock.enter("other")
        self._read_tallies()
        self.lines.flush()  # what follows, an evaluation, may take long
        at.epoch, at.sample = at.epoch + 1, 0
        return True

    def _step(self, batch: Batch) -> None:
        at, job = self.position, self.job
        total = len(job.train_set)
        progress = at.samples(total) / total * job.steps_per_epoch
        lr = learning_rate(self.options, progress, job.steps_per_epoch, self.world.global_batch)
        try:
            with one_pass():
                tally = train_step(job, batch, at.step, lr)
            self.tallies.append((at.step + 1, tally))
            self.tally_samples += len(batch.indices)
        except OutOfMemory:
            if not self.options.skip_oom:
                raise
            # The exception's traceback holds the step's tensors until this block ends: nothing
            # within it may need their memory, and the exception must not outlive it.
            self.job.net.zero_grad(set_to_none=True)
            log.warning("step %d did not fit into memory and was skipped", at.step + 1)
        begin = at.sample + rank_slice(batch.sizes, self.world.rank).start
        self.sample_log.add(at.epoch, begin, batch.indices.tolist())
        at.sample += batch.global_count
        at.step += 1
        self.screen.step(batch.global_count)
        log_point = at.step % self.options.log_every == 0
        loss = self._read_tallies() if log_point else {}
        warming: Dict[str, Any] = {"exact": True} if self._warms() else {}
        samples = len(batch.indices)
        self.lines.add("step", step=at.step, epoch=at.epoch, samples=samples, **warming, **loss)
        if log_point:
            self.lines.flush()
        else:
            self.lines.flush_ready()
            if self.screen.due():
                # The tallies are not reset: the lines must not depend on how fast this machine is.
                self._show_tallies()

    def _warms(self) -> bool:
        """Whether a step summed exactly for a strategy that had not begun yet; says when it does
        begin."""
        attached = self.job.attached
        if attached is None or not attached.sync.strategy.rule.warms:
            return False
        exact = attached.exact
        if self.in_warm_up and not exact:
            spec = attached.effective_spec
            self.screen.say(f"step {self.position.step}: exact sums have ended, {spec} begins")
        self.in_warm_up = exact
        return exact

    def _read_tallies(self) -> Dict[str, Any]:
        """Read what the device has summed up: the only wait for it between steps."""
        count = self.tally_samples
        if count == 0:
            return {}
        rows = self._show_tallies()
        for (step, _), (step_loss, _) in zip(self.tallies, rows):
            self.losses.add(self.position.epoch + 1, step, step_loss)
        # A request like any other: the ranks agree on where to stop, and there on why.
        self.stop.requested |= self.losses.lost
        loss, hits = (sum(column) for column in zip(*rows))
        self.tallies, self.tally_samples = [], 0
        self.epoch_sums = [a + b for a, b in zip(self.epoch_sums, (loss, hits, count))]
        return {"loss": loss / count, "top1": hits / count}

    def _show_tallies(self) -> List[Tuple[float, float]]:
        """Give the screen what the device has summed up so far; returns the sums of loss and hits
        of each step."""
        if self.tally_samples == 0:
            return []
        sums = torch.stack([tally for _, tally in self.tallies])
        rows = [(loss, hits) for loss, hits in sums.double().tolist()]
        loss, correct = (sum(column) for column in zip(*rows))
        total = len(self.job.train_set)
        left = self.options.epochs * total - self.position.samples(total)
        mean, top1 = loss / self.tally_samples, correct / self.tally_samples
        self.screen.figures(self.position.step, left, mean, top1)
        return rows

    def check_finite(self) -> None:
        """Raises Diverged on all ranks if one of them has lost its numbers. Collective; only where
        all ranks have the same buffers."""
        job, at = self.job, self.position
        state = job.precision.full_state(job.model)
        averages = {} if job.ema is None else job.ema.average
        state.update({f"the average of {name}": mean for name, mean in averages.items()})
        broken = finite.not_finite(state, {name for name, _ in job.model.named_parameters()})
        mine: Optional[finite.Trouble] = None
        if self.losses.lost or broken:
            self._read_tallies()  # for the step at which it began
            in_loss = self.losses.count > 0
            mine = finite.Trouble(
                host=self.world.host,
                rank=self.world.rank,
                epoch=self.losses.epoch if in_loss else at.epoch + (at.sample > 0),
                step=self.losses.step if in_loss else at.step,
                loss=self.losses.name,
                tensor=broken[0] if broken else None,
            )
        troubles = [trouble for trouble in self.world.gather(mine) if trouble]
        if troubles:
            raise Diverged(finite.describe(troubles, self.options, self.world))

    def evaluate(self) -> bool:
        """Evaluate the model; True when this is the best result so far."""
        self.clock.enter("evaluate")
        share_buffers(self.job)
        self.check_finite()
        total = -(-len(self.job.eval_set) // self.world.size)
        try:
            result = evaluate(
                self.job,
                lambda done: self.screen.doing(f"evaluating: {done} of rank 0's {total} images"),
            )
        except Unevaluated as unevaluated:
            self.save(best=False)  # what was trained until now is not lost with images of val
            if unevaluated.error is not None:
                raise unevaluated.error from unevaluated
            return False
        at = self.position
        loss, hits, count = (sum(column) for column in zip(*self.world.gather(self.epoch_sums)))
        trained = {"train_loss": loss / max(count, 1), "train_top1": hits / max(count, 1)}
        self.clock.enter("other")
        trained_loss, trained_top1 = trained.values()
        images = len(self.job.eval_set)
        self.screen.evaluation(at.epoch - 1, trained_loss, trained_top1, result, images)
        line = {**result._asdict(), **trained}
        self.lines.add("evaluate", epoch=at.epoch - 1, **line)
        self.lines.flush()
        self.evaluates = math.isfinite(result.loss)
        if not self.evaluates:
            self.screen.say(finite.EVALUATION.format(at.epoch))
            return False
        better = result.top1 > at.best_top1 or at.best_top1 == 0
        at.best_top1 = max(at.best_top1, result.top1)
        return better

    def save(self, best: bool) -> None:
        """Copy the state and let the writer thread write it, on each node's first process."""
        self.due = False
        self.clock.enter("checkpoint")
        self.screen.doing("saving a checkpoint")
        share_buffers(self.job)
        self.check_finite()
        file = None
        if self.writer is not None:
            payload = checkpoint.snapshot(self.job, self.position)
            file = self.writer.save(payload, best, checkpoint.arrival(self.world.device)).name
        own = checkpoint.own_state(self.job, self.position)
        if own is not None and self.own_writer is not None:
            self.own_writer.save(own, best=False, arrived=checkpoint.arrival(self.world.device))
        state = self.job.precision.full_state(self.job.model)
        size = sum(t.numel() * t.element_size() for t in state.values())
        self.clock.enter("other")
        self.lines.add("checkpoint", step=self.position.step, bytes=size, file=file)
        self.lines.flush()

    def _report_start(self, resumed: bool) -> None:
        at = self.position
        start = start_line(self.job, self.cost, at.samples(len(self.job.train_set)))
        self.lines.add("start", timed=False, **start)
        self.lines.flush()
        self.screen.say(describe_run(self.job, self.cost))
        if resumed:
            where = f"epoch {at.epoch + 1}, image {at.sample}, step {at.step}"
            self.screen.say(f"resumed at {where if at.epoch < self.options.epochs else 'its end'}")
        self.screen.watch()

    def end(self, status: str) -> None:
        """Write the last line; nothing is timed after it."""
        self.screen.end()
        self.lines.end(
            status=status,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
            bad_images=len(self.job.train_set.quarantine) + len(self.job.eval_set.quarantine),
        )


# Steps. The first one also warms up the device, so readers of the times leave it out.
LEAST = 4


class Trial(Run):
    """`--trial SECONDS`: steps alone, to see how long they take (`make plan`), until the time is up
    but at least LEAST of them; nothing is evaluated or saved."""

    def __init__(self, options: Options, world: World) -> None:
        super().__init__(options, world)
        if isinstance(self.job.train_set, Generated):
            self.batches = GeneratedBatches(self.job.train_set, options, world)
        # What it learns is thrown away; the steps take as long whatever the loss is.
        self.losses = finite.Losses(enough=math.inf)
        self._until, self._over = time.monotonic() + options.trial, False

    def all_epochs(self) -> bool:
        """False when a stop was requested before the end."""
        while self.epoch():
            self.position.epoch = self.position.sample = 0
        return self._over or not self.stop.requested

    def _step(self, batch: Batch) -> None:
        super()._step(batch)
        over = self.position.step >= LEAST and time.monotonic() >= self._until
        if over and not self.stop.requested:
            # As if somebody had requested a stop, so that all ranks agree on the step.
            self._over = self.stop.requested = True
