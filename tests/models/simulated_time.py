"""An event loop whose time passes only while there is nothing to do: a test on it is the same on
every machine, however busy that is."""

import asyncio
import functools
import selectors

from hermes_rl.models.calls import Clock


class Idle(selectors.SelectSelector):
    """Waits for `patience_s`. Then the time for which it was to wait has passed.

    Args:
        patience_s: for what is on its way between two sockets of this process.
    """

    def __init__(self, patience_s):
        super().__init__()
        self.now, self.patience_s = 0.0, patience_s

    def select(self, timeout=None):
        ready = super().select(
            min(self.patience_s, self.patience_s if timeout is None else timeout)
        )
        if not ready:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time passes only while there is nothing to do."""

    def __init__(self, patience_s=0.0):
        self.idle = Idle(patience_s)
        super().__init__(self.idle)

    def time(self):
        return self.idle.now


def in_simulated_time(test, patience_s=0.0):
    """Run a test on a `SimulatedLoop`."""

    @functools.wraps(test)
    def run(*args, **named):
        with asyncio.Runner(loop_factory=lambda: SimulatedLoop(patience_s)) as runner:
            runner.run(test(*args, **named))

    return run


with_sockets = functools.partial(in_simulated_time, patience_s=0.03)
"""For a test that uses sockets of its own process."""


def loop_clock():
    """The time of the running loop."""
    time = asyncio.get_running_loop().time
    return Clock(monotonic=time, time=time)
