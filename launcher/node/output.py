"""What launch and the workers print and report, on its way to the control side."""

import selectors
import time

POLL = 0.05  # seconds between two reads of output that keeps coming: one read takes many lines


class Output:
    """Passes output and news on; `ended(worker)` is called at the end of each worker."""

    def __init__(self, workers, link, selector, ended):
        self.workers, self.link, self.selector, self.ended = workers, link, selector, ended
        self.next_poll = None  # None: woken by the next byte

    def poll(self):
        """Every POLL seconds while there is something, else when woken."""
        now = time.monotonic()
        if self.next_poll is not None and now < self.next_poll:
            return
        busy = self.pass_on()
        self.listen(not busy)
        self.next_poll = now + POLL if busy else None

    def listen(self, wanted):
        """Be woken by output, or not."""
        readers = [stream.reader for stream in self.workers.all_streams()]
        for fd in [*readers, self.workers.reports.fd]:
            known = fd in self.selector.get_map()
            if wanted and not known:
                self.selector.register(fd, selectors.EVENT_READ)
            elif known and not wanted:
                self.selector.unregister(fd)

    def pass_on(self):
        """Send news, and a worker's output before its end. Returns whether more may follow."""
        frames = self.link.frames
        news = self.workers.news()
        busy = frames.full or self.pass_on_output()
        for event, worker in news:
            if event == "start":
                frames.send("worker", rank=worker.rank, pid=worker.pid)
            else:
                self.ended(worker)
        return busy

    def pass_on_output(self):
        """Send what the workers wrote. Returns whether there was anything."""
        frames, found = self.link.frames, False
        for stream in self.workers.all_streams():
            data = stream.read()
            while data:
                found = True
                frames.send("log", data, rank=stream.rank, stream=stream.name)
                data = b"" if frames.full else stream.read()
        return found

    def pass_on_the_rest(self):
        """All writers are dead: what is in the pipes now is the rest."""
        self.pass_on()
        while self.link.frames.full and self.link.deliverable():
            self.link.wait_for_reader()
            self.pass_on()
