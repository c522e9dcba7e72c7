"""What tests and notebook validation run under, and what nbval needs so that a hung cell ends."""

import os
import time
from queue import Empty

import pytest

from utils.notebooks import ENVIRONMENT

os.environ.update(ENVIRONMENT)

LATE_OUTPUT = 10  # seconds that a finished cell's output may be late on a busy machine (nbval: 5)


class KernelDied(Exception):
    pass


def pytest_configure(config):
    if config.option.nbval:
        patterns = config.option.nbval_sanitize_with
        config.option.nbval_sanitize_with = str(config.rootpath / patterns)
        watch_kernels()


def pytest_itemcollected(item):
    if hasattr(item, "output_timeout"):
        item.output_timeout = LATE_OUTPUT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except KernelDied:
        item.parent.timed_out = True  # the cells after it are expected to fail
        raise


def watch_kernels():
    """Make nbval see at once that a kernel died, and leave no process of it behind."""
    from nbval.kernel import RunningKernel
    from nbval.plugin import IPyNbFile

    from utils.notebooks.run import end_session

    if hasattr(RunningKernel, "await_reply_once"):
        return
    RunningKernel.await_reply_once = RunningKernel.await_reply
    start, stop_file = RunningKernel.__init__, IPyNbFile.teardown

    def start_and_note(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.pid = self.km.provisioner.process.pid

    def await_reply(self, msg_id, timeout=None):
        end = time.monotonic() + (timeout or float("inf"))
        while True:
            try:
                return self.await_reply_once(msg_id, timeout=1)
            except Empty:
                if not self.is_alive():
                    message = "the kernel died in this cell: killed, out of memory, or it exited"
                    raise KernelDied(message) from None
                if time.monotonic() > end:
                    raise

    def stop_all(self):
        try:
            stop_file(self)
        finally:
            if self.kernel is not None:
                end_session(self.kernel.pid)

    RunningKernel.__init__ = start_and_note
    RunningKernel.await_reply = await_reply
    IPyNbFile.teardown = stop_all
