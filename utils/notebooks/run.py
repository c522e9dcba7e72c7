"""Execute notebooks from top to bottom and save clean outputs."""

import os
import re
import subprocess
import threading
import time

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

from utils.notebooks import COURSE, ENVIRONMENT, code_cells, rules, setting

TIMEOUT = float(setting(r"--nbval-cell-timeout=(\d+)"))  # of a cell, as when it is validated
WIDGET = "application/vnd.jupyter.widget-view+json"


def session(kernel):
    """The processes of a kernel's session: the kernel and all it started, orphans included."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == kernel:
                found.append(process)
        except (OSError, psutil.Error):
            pass
    return found


def end_session(kernel):
    """Kill what a kernel left behind; give the number of processes."""
    left = session(kernel)
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            pass
    psutil.wait_procs(left, timeout=5)
    return len(left)


class Meter:
    """Peak memory of a kernel and its children, sampled while cells run."""

    def __init__(self):
        self.kernel, self.peak, self.ended = None, 0, threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self):
        while not self.ended.wait(0.05):
            if self.kernel:
                self.peak = max(self.peak, self.now())

    def now(self):
        total = 0
        try:
            kernel = psutil.Process(self.kernel)
            for process in [kernel, *kernel.children(recursive=True)]:
                total += process.memory_info().rss
        except psutil.Error:
            pass
        return total


class Client(NotebookClient):
    """Runs a notebook in this environment's Python and reports each cell's time and memory."""

    def __init__(self, notebook, folder):
        super().__init__(
            notebook,
            kernel_name=CURRENT_ENV_KERNEL_NAME,
            resources={"metadata": {"path": str(folder)}},
            timeout=TIMEOUT,
            coalesce_streams=True,
            store_widget_state=False,
        )
        self.meter = Meter()
        self.report, self.cell = [], 0
        self.on_cell_execute = self.before
        self.on_cell_executed = self.after

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        manager.kernel_spec_manager = NbvalKernelspecManager()
        return manager

    def before(self, cell, cell_index):
        self.meter.kernel = self.km.provisioner.process.pid
        self.meter.peak = self.meter.now()
        self.cell = cell_index + 1
        self.started = time.perf_counter()

    def after(self, cell, cell_index, execute_reply):
        self.meter.peak = max(self.meter.peak, self.meter.now())
        seconds = time.perf_counter() - self.started
        self.report.append((cell_index + 1, seconds, self.meter.peak / 1e6))


def without_machine(text):
    """Tracebacks name files; keep what is the same on every machine."""
    home = os.path.expanduser("~")
    for folder in {str(COURSE), str(COURSE).replace(home, "~", 1)}:
        text = text.replace(folder + "/", "")
    text = re.sub(r"[^\s\"'\x1b]*/(site-packages/)", r"\1", text)
    return re.sub(r"[^\s\"'\x1b]*/(lib/python3\.\d+/)", r"\1", text)


def clean(notebook):
    """Keep of the metadata what readers need, in place: nothing of an editor or a machine."""
    notebook["metadata"] = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )
    notebook["nbformat"], notebook["nbformat_minor"] = 4, 5
    for number, cell in enumerate(notebook["cells"], start=1):
        cell.setdefault("id", f"cell-{number}")
        cell["metadata"] = nbformat.from_dict(
            {"tags": list(cell["metadata"]["tags"])} if cell["metadata"].get("tags") else {}
        )
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            output.get("data", {}).pop(WIDGET, None)  # would show an error without its state
            if "traceback" in output:
                output["traceback"] = [without_machine(line) for line in output["traceback"]]


def execute(path):
    """Run one notebook in place; give (report, problem or None). Saved only if there is none."""
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell["outputs"], cell["execution_count"] = [], None
    client = Client(notebook, path.parent)
    problem = None
    try:
        client.execute(stderr=subprocess.DEVNULL)  # cells' own stderr comes by message
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = f"cell {client.cell}: {error}"
    finally:
        client.meter.ended.set()
        if client.meter.kernel:
            end_session(client.meter.kernel)
    if problem is None:
        clean(notebook)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return client.report, problem


def main(paths):
    os.environ.update(ENVIRONMENT)
    failed = False
    for path in paths:
        report, problem = execute(path)
        print(f"{path.name}: {sum(seconds for _, seconds, _ in report):.1f} s")
        for cell, seconds, megabytes in report:
            print(f"    cell {cell:3}  {seconds:7.2f} s  {megabytes:8.0f} MB at its peak")
        problems = [problem] if problem else rules.check(path.resolve())
        for text in problems:
            print(f"{path.name}: {text}")
        failed = failed or bool(problems)
    return failed
