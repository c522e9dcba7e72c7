"""What tests and notebooks run under, and what nbval lacks: an end for kernels, fair figures."""

import os
import time
from importlib.metadata import version
from queue import Empty

import pytest

from utils.notebooks import ENVIRONMENT, setting

os.environ.update(ENVIRONMENT)

LATE_OUTPUT = 10  # seconds that a finished cell's output may be late on a busy machine (nbval: 5)


# Matplotlib lays figures out a little differently in each minor release.
DRAWN_BY = setting(r"matplotlib (\d+\.\d+)")
COMPARE_FIGURES = version("matplotlib").startswith(DRAWN_BY + ".")
FIGURE = r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+"


class KernelDied(Exception):
    pass


def pytest_configure(config):
    if config.option.nbval:
        patterns = config.option.nbval_sanitize_with
        config.option.nbval_sanitize_with = str(config.rootpath / patterns)
        complete_nbval()


def pytest_report_header(config):
    if config.option.nbval and not COMPARE_FIGURES:
        here = version("matplotlib")
        return f"saved figures are of matplotlib {DRAWN_BY}, here is {here}: not compared"


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


def complete_nbval():
    """Have nbval see at once that a kernel died, leave no process behind, and compare figures only
    with those of the same matplotlib."""
    from nbval.kernel import RunningKernel
    from nbval.plugin import IPyNbFile

    from utils.notebooks.run import end_session

    if hasattr(RunningKernel, "await_reply_once"):
        return
    RunningKernel.await_reply_once = RunningKernel.await_reply
    start, stop_file = RunningKernel.__init__, IPyNbFile.teardown
    read_patterns = IPyNbFile.setup_sanitize_files

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

    def read_patterns_and_figures(self):
        read_patterns(self)
        if not COMPARE_FIGURES:
            self.sanitize_patterns[FIGURE] = "FIGURE"

    def stop_all(self):
        try:
            stop_file(self)
        finally:
            if self.kernel is not None:
                end_session(self.kernel.pid)

    RunningKernel.__init__ = start_and_note
    RunningKernel.await_reply = await_reply
    IPyNbFile.setup_sanitize_files = read_patterns_and_figures
    IPyNbFile.teardown = stop_all
