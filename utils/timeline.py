"""What ran when, on which device and wire: kept as events, summarised, drawn and exported."""

import json
from dataclasses import dataclass, field, replace

import pandas as pd

from utils import plots, traces
from utils.events import Event, difference, total, union


@dataclass
class Timeline:
    """Everything that one recording saw.

    `devices` are the names of the device rows ("gpu0", …), `machine` a description for titles
    ("4 × V100 on pcie-switch"), `peak_memory` for each device the bytes by kind at its peak, and
    `duration` the seconds from start to end of the recording (the end of the last event if None).
    """

    events: list[Event] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    simulated: bool = True
    machine: str = ""
    peak_memory: list[dict[str, int]] = field(default_factory=list)
    duration: float | None = None

    def __post_init__(self):
        if self.duration is None:
            self.duration = max((event.end for event in self.events), default=0.0)

    @property
    def title(self):
        """How the figures came about: "simulated: <machine>" or "measured on <machine>"."""
        if self.simulated:
            return f"simulated: {self.machine}" if self.machine else "simulated"
        return f"measured on {self.machine}" if self.machine else "measured"

    def _name(self, device):
        if isinstance(device, int) and -len(self.devices) <= device < len(self.devices):
            return self.devices[device]
        if device not in self.devices:
            names = ", ".join(self.devices) or "no devices"
            raise ValueError(f"no device {device!r} in this timeline; it has {names}")
        return device

    def intervals(self, device, kind):
        """When the device (its name or number) had work of a kind: sorted, disjoint (start, end).

        A communication concerns the devices of its event or, where it names none, those at the ends
        of its wires.
        """
        name = self._name(device)
        index = self.devices.index(name)

        def concerns(event):
            if name in event.rows or index in event.devices:
                return True
            return not event.devices and any(name in row.split("→") for row in event.rows)

        return union((e.start, e.end) for e in self.events if e.kind == kind and concerns(e))

    def busy(self, device):
        """Seconds in which the device computes."""
        return total(self.intervals(device, "compute"))

    def communication(self, device):
        """Seconds in which the device sends or receives."""
        return total(self.intervals(device, "communication"))

    def exposed(self, device):
        """Seconds in which the device sends or receives and does not compute."""
        sending = self.intervals(device, "communication")
        return total(difference(sending, self.intervals(device, "compute")))

    def idle(self, device):
        """Seconds of the recording in which the device neither computes nor communicates."""
        active = self.intervals(device, "compute") + self.intervals(device, "communication")
        return total(difference([(0.0, self.duration)], active))

    def wire_time(self):
        """Seconds in which any wire is busy."""
        return total((e.start, e.end) for e in self.events if e.kind == "communication")

    def bytes_sent(self, device):
        """Bytes that left the device over its wires."""
        name = self._name(device)
        return sum(
            event.bytes
            for event in self.events
            if event.kind == "communication"
            and any(row.startswith(f"{name}→") for row in event.rows)
        )

    def between(self, start, end):
        """What happened from one second to another, as a timeline of its own.

        Events that reach beyond are cut there, though their bytes and FLOPs stay whole.
        """
        if not 0 <= start <= end:
            raise ValueError(
                f"a part of a timeline begins before it ends, not from {start} to {end}"
            )
        events = [
            replace(event, start=first - start, duration=last - first)
            for event in self.events
            for first, last in [(max(event.start, start), min(event.end, end))]
            if first < last
        ]
        return replace(self, events=events, peak_memory=[], duration=end - start)

    def summary(self):
        """A DataFrame with a row a device: milliseconds and, where known, peak memory in MB."""
        table = pd.DataFrame(
            {
                "busy (ms)": [self.busy(d) * 1e3 for d in self.devices],
                "communication (ms)": [self.communication(d) * 1e3 for d in self.devices],
                "exposed communication (ms)": [self.exposed(d) * 1e3 for d in self.devices],
                "idle (ms)": [self.idle(d) * 1e3 for d in self.devices],
            },
            index=pd.Index(self.devices, name="device"),
        )
        if self.peak_memory:
            table["peak memory (MB)"] = [sum(kinds.values()) / 1e6 for kinds in self.peak_memory]
        table.attrs["title"] = self.title
        table.columns.name = "simulated" if self.simulated else "measured"
        return table.round(3)

    def plot(self, ax=None, rows="all", title=None):
        """Draw the events of "all" rows, of "devices" or of "links"; returns nothing."""
        plots.draw_timeline(self, ax=ax, rows=rows, title=title)

    def to_chrome_trace(self, path):
        """Write Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(traces.to_trace(self), file)

    @classmethod
    def from_profiler(cls, trace, machine="", devices=None, peak_memory=()):
        """The measured timeline of a profile: what torch.profiler's export_chrome_trace wrote.

        `trace` is the dict of that JSON, or the path of its file. With GPUs their kernels and
        copies and the host's CUDA calls become events, on a CPU its operations. Time runs from the
        first to the end of the last of these, the host's waiting included. `devices` are the names
        of devices to show though they may have done nothing.
        """
        if not isinstance(trace, dict):
            with open(trace, encoding="utf-8") as file:
                trace = json.load(file)
        events, found, duration = traces.read_profile(trace)
        names = list(dict.fromkeys([*(devices or []), *found]))
        return cls(events, names, False, machine, list(peak_memory), duration)
