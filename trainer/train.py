"""A training run from beginning to end: build, loop, evaluate, save.

process.py makes a `Run`, or a `Trial` of some steps, and passes it to `train`. step.py computes one
step. This file decides when to evaluate, save and stop, and reads losses from the device.
"""

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
from .memory import OutOfMemory, detect_out_of_memory
from .models import measure_cost
from .optim import learning_rate
from .screen import Screen
from .step import agree_micro_batches, rebuild_buckets, train_step
from .stop import Stop
from .world import World
from .writer import Writer

log = logging.getLogger(__name__)


def train(run: "Run") -> int:
    """Train as the run's options say; return the exit code. Raises UserError for bad input."""
    writers = [writer for writer in (run.writer, run.rank_writer) if writer is not None]
    try:
        finished = run.train_epochs()
        run.clock.enter("checkpoint")
        for writer in writers:
            writer.finish()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a broken device cannot be read any more
            run.end("failed")
        for writer in writers:
            # Writing may fail, too, but the user needs the first error.
            with contextlib.suppress(UserError):
                writer.finish()  # the process may exit without waiting for its threads
        raise
    run.end("finished" if finished else "stopped")
    return 0 if finished else STOPPED


class Run:
    """One attempt at a run: the job, its position, and the files and screen for its figures."""

    def __init__(self, options: Options, world: World) -> None:
        materials = build_materials(options, world)
        self.clock = Clock(world.device)
        # `measure_cost` runs a forward, and comes first: `build_job` lets apex replace the model's
        # forward, and apex would remember the weights that it casts for `measure_cost`.
        self.cost = measure_cost(materials.model, materials.image_size)
        self.job = build_job(options, world, materials, self.clock)
        self.options, self.world = options, world
        with world.raise_on_all_ranks():
            self.lines = Lines(options.output, world.host, world.rank, self.clock)
            self.screen = Screen(options, world, self.job.steps_per_epoch, self.lines)
            self.sample_log = SampleLog(options, world)
        self.batches = TrainBatches(materials.train_set, options, world)
        self.stop = Stop(world)
        folder = pathlib.Path(options.output or ".", "checkpoints", world.host)
        is_saving = bool(options.output) and world.local_rank == 0
        self.writer: Optional[Writer] = Writer(folder, options.keep) if is_saving else None
        # For the state that the strategy keeps for this machine. Each rank has this writer, but
        # only the machine's first rank has a state to write (checkpoint.copy_node_state).
        rank_folder = folder / f"rank{world.rank}"
        self.rank_writer: Optional[Writer] = (
            Writer(rank_folder, options.keep) if options.output else None
        )
        # For each step since the last log point: its number, and a tensor (2) on the device with
        # this rank's sums of the loss and of the hits.
        self.tallies: List[Tuple[int, torch.Tensor]] = []
        self.tally_samples = 0  # in these steps
        self.losses = finite.Losses(options.nonfinite_steps)
        self.outputs_are_finite = True  # in the last evaluation
        self.checkpoint_due = False  # whether --checkpoint_every demands a checkpoint now
        self.was_exact = False  # whether the last step summed exactly, in the strategy's warm-up
        self.epoch_sums = [0.0, 0.0, 0]  # loss, hits and samples of this rank, epoch and attempt
        # The order matters: the dummy passes of rebuild_buckets have the size that the ranks agree
        # on, and the clock and the position begin after these passes.
        agree_micro_batches(self.job)
        parallel.check_micro_batches(options, world, self.job.micro_batches)
        rebuild_buckets(self.job)
        if self.job.attached is not None:
            self.job.attached.say = self.screen.say
        self.clock.restart()
        self._find_position()

    def _find_position(self) -> None:
        """Resume a checkpoint, or start a new run, from weights if they are given. Write the line
        `start`, and print what is trained and from where. Raises UserError. Collective."""
        self.clock.enter("checkpoint")
        state, sync = resume.find(self.job), self.job.sync
        notes: List[str] = []
        if state is None:
            self.position = checkpoint.Position.of_new_run(self.world)
            if self.options.weights is not None:
                weights.start_from_weights(self.job)
        else:
            self.position = checkpoint.restore(self.job, state)
            has_node_state = resume.restore_node_state(self.job, self.position)
            notes.append(resume.describe_epochs_change(self.job, state))
            if not has_node_state:
                notes.append(resume.NODE_STATE_LOST.format(self.options.sync))
            # The strategy counts steps of this run's size, and the checkpoint's may have another.
            if self.job.attached is not None:
                images = len(self.job.train_set)
                samples = self.position.samples(images)
                self.job.attached.steps = samples * self.job.steps_per_epoch // images
            # A run on one machine saves no common state, which this run's strategy may need.
            if state["sync"] is None and sync is not None and sync.common_state(self.job.model):
                notes.append(resume.COMMON_STATE_LOST.format(self.options.sync))
        self.clock.enter("other")
        position = self.position
        start = start_line(self.job, self.cost, position.samples(len(self.job.train_set)))
        self.lines.add("start", timed=False, **start)
        self.lines.flush()
        self.screen.say(describe_run(self.job, self.cost))
        if state is not None:
            resume_point = "its end"
            if position.epoch < self.options.epochs:
                resume_point = (
                    f"epoch {position.epoch + 1}, image {position.sample}, step {position.step}"
                )
            self.screen.say(f"resumed at {resume_point}")
        self.screen.watch()
        for note in filter(None, notes):
            self.screen.say(note)

    def train_epochs(self) -> bool:
        """Train from the position to the end. Returns False if stopped earlier. Raises Diverged."""
        while self.position.epoch < self.options.epochs:
            if not self.train_epoch():
                self.save(best=False)
                return False
            completed = self.position.epoch
            is_last = completed == self.options.epochs
            is_best = (is_last or completed % self.options.evaluate_every == 0) and self.evaluate()
            # `checkpoint_due` is set here if the epoch's last step demands a checkpoint. With
            # --checkpoint_every 0, each epoch ends with a checkpoint.
            if is_last or is_best or self.checkpoint_due or self.options.checkpoint_every == 0:
                self.save(is_best)
        # An evaluation in the middle of a run only warns: the outputs may become finite again.
        if not self.outputs_are_finite:
            causes = "; ".join(finite.list_causes(self.options))
            raise Diverged(f"{finite.EVALUATION.format(self.position.epoch)}. Likely: {causes}.")
        return True

    def train_epoch(self) -> bool:
        """Train from the position to the epoch's end. Returns False if a stop was requested."""
        position, job = self.position, self.job
        self.epoch_sums = [0.0, 0.0, 0]
        # After a resume, the position may be within the epoch.
        completed_steps = round(position.sample / len(job.train_set) * job.steps_per_epoch)
        self.screen.begin_epoch(position.epoch, completed_steps)
        self.clock.enter("data")
        for batch in self.batches.epoch(position.epoch, position.sample):
            if self.stop.should_stop():
                return False
            self._step(batch)
            interval = self.options.checkpoint_every
            self.checkpoint_due |= interval > 0 and position.step % interval == 0
            # After an epoch's last step, `train_epochs` evaluates first and then saves.
            if self.checkpoint_due and position.sample < len(job.train_set):
                self.save(best=False)
            self.clock.enter("data")
        self.clock.enter("other")
        self._collect_tallies()
        self.lines.flush()  # an evaluation may follow, and take long
        position.epoch, position.sample = position.epoch + 1, 0
        return True

    def _step(self, batch: Batch) -> None:
        """Train on this rank's share of a step, advance the position, and log the step."""
        position, job = self.position, self.job
        # The learning rate follows the images, not `position.step`: before a resume, a step may
        # have had another number of images.
        epochs = position.samples(len(job.train_set)) / len(job.train_set)
        steps = epochs * job.steps_per_epoch
        lr = learning_rate(self.options, steps, job.steps_per_epoch, self.world.global_batch)
        try:
            with detect_out_of_memory():
                tally = train_step(job, batch, position.step, lr)
            self.tallies.append((position.step + 1, tally))
            self.tally_samples += len(batch.indices)
        except OutOfMemory:
            if not self.options.skip_oom:
                raise
            # The exception's traceback holds the step's tensors until this block ends: nothing
            # within it may need their memory, and the exception must not outlive it.
            self.job.net.zero_grad(set_to_none=True)
            log.warning("step %d did not fit into memory and was skipped", position.step + 1)
        # The position of this rank's first sample in the epoch's order.
        begin = position.sample + rank_slice(batch.sizes, self.world.rank).start
        self.sample_log.add(position.epoch, begin, batch.indices.tolist())
        position.sample += batch.global_count
        position.step += 1
        self.screen.count_step(batch.global_count)
        is_log_point = position.step % self.options.log_every == 0
        fields = self._collect_tallies() if is_log_point else {}
        # A strategy with a warm-up sums exactly at first. The line says so, because such a step
        # takes another time than later steps.
        attached = job.attached
        if attached is not None and attached.sync.strategy.rule.warms:
            if self.was_exact and not attached.exact:
                spec = attached.effective_spec
                self.screen.say(f"step {position.step}: exact sums have ended, {spec} begins")
            self.was_exact = attached.exact
            if attached.exact:
                fields = {"exact": True, **fields}
        samples = len(batch.indices)
        self.lines.add("step", step=position.step, epoch=position.epoch, samples=samples, **fields)
        if is_log_point:
            self.lines.flush()
        else:
            self.lines.flush_ready()
            if self.screen.is_due():
                # The tallies are not reset: the lines must not depend on how fast this machine is.
                self._show_tallies()

    def _collect_tallies(self) -> Dict[str, Any]:
        """Read the sums of loss and hits from the device, and reset them. Return the means over
        samples as {"loss": ..., "top1": ...}, or {} if there were no samples. Waits for the
        device."""
        count = self.tally_samples
        if count == 0:
            return {}
        rows = self._show_tallies()
        for (step, _), (step_loss, _) in zip(self.tallies, rows):
            self.losses.add(self.position.epoch + 1, step, step_loss)
        # All ranks stop at a common step, as after SIGTERM. `check_finite` then finds the reason.
        if self.losses.is_over_limit:
            self.stop.request()
        loss, hits = (sum(column) for column in zip(*rows))
        self.tallies, self.tally_samples = [], 0
        self.epoch_sums = [a + b for a, b in zip(self.epoch_sums, (loss, hits, count))]
        return {"loss": loss / count, "top1": hits / count}

    def _show_tallies(self) -> List[Tuple[float, float]]:
        """Show the means of loss and hits on the screen. Return this rank's sums (loss, hits) of
        each step since the last log point. Waits for the device."""
        if self.tally_samples == 0:
            return []
        sums = torch.stack([tally for _, tally in self.tallies])
        rows = [(loss, hits) for loss, hits in sums.double().tolist()]
        loss, hits = (sum(column) for column in zip(*rows))
        total = len(self.job.train_set)
        remaining_images = self.options.epochs * total - self.position.samples(total)
        mean, top1 = loss / self.tally_samples, hits / self.tally_samples
        self.screen.show_figures(self.position.step, remaining_images, mean, top1)
        return rows

    def check_finite(self) -> None:
        """Raise Diverged on all ranks if the model or the losses of a rank are not finite. Call
        this after `share_buffers`. Collective."""
        job, position = self.job, self.position
        state = job.precision.full_state(job.model)
        averages = {} if job.ema is None else job.ema.average
        state.update({f"the average of {name}": mean for name, mean in averages.items()})
        broken = finite.not_finite(state, {name for name, _ in job.model.named_parameters()})
        local_trouble: Optional[finite.Trouble] = None
        if self.losses.is_over_limit or broken:
            # The losses since the last log point may show the step at which the trouble began.
            self._collect_tallies()
            bad_loss = self.losses.count > 0
            # A Trouble's epoch counts from 1, and `position.epoch` counts complete epochs.
            local_trouble = finite.Trouble(
                host=self.world.host,
                rank=self.world.rank,
                epoch=self.losses.epoch if bad_loss else position.epoch + (position.sample > 0),
                step=self.losses.step if bad_loss else position.step,
                loss=self.losses.name,
                tensor=broken[0] if broken else None,
            )
        troubles = [trouble for trouble in self.world.gather(local_trouble) if trouble]
        if troubles:
            raise Diverged(finite.describe(troubles, self.options, self.world))

    def evaluate(self) -> bool:
        """Evaluate; return whether the result is the best so far. Raises UserError. Collective."""
        self.clock.enter("evaluate")
        share_buffers(self.job)
        self.check_finite()
        image_count = len(self.job.eval_set)
        share = -(-image_count // self.world.size)  # rounded up
        try:
            result = evaluate(
                self.job,
                lambda done: self.screen.set_activity(
                    f"evaluating: {done} of rank 0's {share} images"
                ),
            )
        except Unevaluated as unevaluated:
            # Only images of val are lost: the model that was trained so far is worth saving.
            self.save(best=False)
            if unevaluated.error is not None:
                raise unevaluated.error from unevaluated
            return False  # another rank, which cannot read its images, raises its error
        position = self.position
        # The sums of all ranks over this epoch's training steps.
        loss, hits, count = (sum(column) for column in zip(*self.world.gather(self.epoch_sums)))
        train_loss, train_top1 = loss / max(count, 1), hits / max(count, 1)
        self.clock.enter("other")
        # `position.epoch` counts complete epochs, and the figures number them from 0.
        epoch = position.epoch - 1
        self.screen.show_evaluation(epoch, train_loss, train_top1, result, image_count)
        line = {**result._asdict(), "train_loss": train_loss, "train_top1": train_top1}
        self.lines.add("evaluate", epoch=epoch, **line)
        self.lines.flush()
        self.outputs_are_finite = math.isfinite(result.loss)
        if not self.outputs_are_finite:
            self.screen.say(finite.EVALUATION.format(position.epoch))
            return False
        # A result of 0 is the best until one is better, so the first result is always the best.
        is_best = result.top1 > position.best_top1 or position.best_top1 == 0
        position.best_top1 = max(position.best_top1, result.top1)
        return is_best

    def save(self, best: bool) -> None:
        """Copy the state, and let the writer thread of each node's first process write the copy.
        `best`: also as best.pt. Raises Diverged; RankError if the previous checkpoint could not be
        written. Collective."""
        self.checkpoint_due = False
        self.clock.enter("checkpoint")
        self.screen.set_activity("saving a checkpoint")
        # All ranks check before a rank writes: a diverged model must not replace a good model.
        share_buffers(self.job)
        self.check_finite()
        file = None
        if self.writer is not None:
            payload = checkpoint.snapshot(self.job, self.position)
            wait_for_copies = checkpoint.make_copy_waiter(self.world.device)
            file = self.writer.save(payload, best, wait_for_copies).name
        node_state = checkpoint.copy_node_state(self.job, self.position)
        if node_state is not None and self.rank_writer is not None:
            wait_for_copies = checkpoint.make_copy_waiter(self.world.device)
            self.rank_writer.save(node_state, best=False, wait_for_copies=wait_for_copies)
        tensors = self.job.precision.full_state(self.job.model).values()
        model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.clock.enter("other")
        self.lines.add("checkpoint", step=self.position.step, bytes=model_bytes, file=file)
        self.lines.flush()

    def end(self, status: str) -> None:
        """Write the last line; nothing is timed after it."""
        self.screen.end()
        self.lines.end(
            status=status,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
            bad_images=len(self.job.train_set.quarantine) + len(self.job.eval_set.quarantine),
        )


MIN_STEPS = 4  # of a trial; readers of the times ignore the first, which also warms up the device


class Trial(Run):
    """`--trial SECONDS`: run steps until the time is up, at least MIN_STEPS, so that `make plan`
    knows how long a step takes. A trial evaluates and saves nothing."""

    def __init__(self, options: Options, world: World) -> None:
        super().__init__(options, world)
        if isinstance(self.job.train_set, Generated):
            self.batches = GeneratedBatches(self.job.train_set, options, world)
        # A step takes the same time if the loss is not finite, and nobody uses the model.
        self.losses = finite.Losses(limit=math.inf)
        self._end_time = time.monotonic() + options.trial
        self._time_is_up = False  # on the rank that asks the others to stop

    def train_epochs(self) -> bool:
        """Repeat the first epoch until the time is up. Returns False if stopped earlier."""
        while self.train_epoch():
            self.position.epoch = self.position.sample = 0
        # A rank that another rank stopped supposes that the time was up.
        return self._time_is_up or not self.stop.requested

    def _step(self, batch: Batch) -> None:
        super()._step(batch)
        is_time_up = self.position.step >= MIN_STEPS and time.monotonic() >= self._end_time
        if is_time_up and not self.stop.requested:
            # The ranks agree on the last step as after SIGTERM: their clocks may differ.
            self._time_is_up = True
            self.stop.request()
