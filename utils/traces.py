"""Between timelines and Trace Event JSON: what torch.profiler writes, and what Perfetto reads.

The format: a list of events with phase "X" (a slice with start `ts` and `dur`, both in µs, on
thread `tid` of process `pid`) or "M" (metadata such as names).
"""

import re

from utils.events import Event

_HOST = ("cuda_runtime", "cuda_driver")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_RECORDED = (*_GPU, *_HOST, "cpu_op", "user_annotation")


def to_trace(timeline):
    """The dict to write as JSON: devices, wires and host are processes, their rows threads."""
    title = timeline.title
    rows = list(timeline.devices)
    rows += sorted({row for event in timeline.events for row in event.rows} - set(rows))
    groups = {"devices": 1, "wires": 2, "host": 3}
    trace = []
    for name, pid in groups.items():
        trace.append(_metadata("process_name", pid, 0, name=f"{name} ({title})"))
        trace.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
    tid = 0
    for row in rows:
        group = "devices" if row in timeline.devices else "wires" if "→" in row else "host"
        pid = groups[group]
        for number, lane in enumerate(_lanes([e for e in timeline.events if row in e.rows])):
            tid += 1
            name = row if number == 0 else f"{row} ({number + 1})"
            trace.append(_metadata("thread_name", pid, tid, name=name))
            trace.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            trace += [_slice(event, pid, tid) for event in lane]
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _metadata(kind, pid, tid, **args):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(event, pid, tid):
    args = {"bytes": event.bytes, "flops": event.flops, "devices": list(event.devices)}
    return {
        "ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid,
        "ts": event.start * 1e6, "dur": event.duration * 1e6, "args": args,
    }  # fmt: skip


def _lanes(events):
    """The events in lists without overlaps, as one thread of a trace can show them."""
    lanes = [[]]
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        for lane in lanes:
            if not lane or lane[-1].end <= event.start + 1e-9:
                lane.append(event)
                break
        else:
            lanes.append([event])
    return lanes


def read_profile(trace):
    """Events, device names and duration (s) of a profile that torch.profiler exported.

    Kernels and memsets become compute; copies between devices, or between device and host, become
    communication; so do NCCL's kernels, whose bytes and wires the profile does not tell. Calls of
    the CUDA runtime are the host's. Without any GPU work, the operations that no other operation
    called are the compute of a device "cpu". A profile with nothing of these is an empty timeline.
    """
    slices = [s for s in trace.get("traceEvents", []) if is_recorded(s)]
    if not slices:
        return [], [], 0.0
    start = min(s["ts"] for s in slices)
    end = max(s["ts"] + s.get("dur", 0) for s in slices)
    on_gpus = [s for s in slices if s["cat"] in _GPU]
    if on_gpus:
        events = [_gpu_event(s, start) for s in on_gpus]
        events += [_event(s, start, "host", ("host",)) for s in slices if s["cat"] in _HOST]
        count = 1 + max(number for event in events for number in event.devices)
        devices = [f"gpu{i}" for i in range(count)]
    else:
        events = [_event(s, start, "compute", ("cpu",), (0,)) for s in _outermost(slices)]
        devices = ["cpu"]
    return sorted(events, key=lambda e: e.start), devices, (end - start) * 1e-6


def is_recorded(s):
    """Whether an entry of a profile becomes an event, or part of one."""
    return s.get("ph") == "X" and "ts" in s and s.get("cat") in _RECORDED


def _event(s, start, kind, rows, devices=()):
    """Event of a slice whose recording starts at `start` (µs)."""
    moved = int(s.get("args", {}).get("bytes", 0))
    seconds = (s["ts"] - start) * 1e-6, s.get("dur", 0) * 1e-6
    return Event(short_name(s["name"]), kind, rows, *seconds, devices, moved)


def _gpu_event(s, start):
    args = s.get("args", {})
    if "fromDevice" in args and args["fromDevice"] != args["toDevice"]:
        ends = args["fromDevice"], args["toDevice"]
        return _event(s, start, "communication", (f"gpu{ends[0]}→gpu{ends[1]}",), ends)
    device = int(args.get("device", args.get("inDevice", s["pid"])))
    name = f"gpu{device}"
    if "HtoD" in s["name"]:
        return _event(s, start, "communication", (f"cpu0→{name}",), (device,))
    if "DtoH" in s["name"]:
        return _event(s, start, "communication", (f"{name}→cpu0",), (device,))
    if s["name"].lower().startswith("nccl"):
        return _event(s, start, "communication", (f"{name}→nccl",), (device,))
    return _event(s, start, "compute", (name,), (device,))


def _outermost(slices):
    """The operations that run inside no other operation of their thread."""
    found, ends = [], {}
    operations = [s for s in slices if s["cat"] == "cpu_op"]
    for s in sorted(operations, key=lambda s: (s["ts"], -s.get("dur", 0))):
        thread = s.get("pid"), s.get("tid")
        if s["ts"] >= ends.get(thread, float("-inf")):
            ends[thread] = s["ts"] + s.get("dur", 0)
            found.append(s)
    return found


def short_name(name):
    """A name to show: a kernel's without its C++ templates and arguments, "mm" for "aten::mm"."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if name.startswith(("Memcpy", "Memset")):
        return name
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or name
