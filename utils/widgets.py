"""Interactive views: sliders over the static figures of `figures.py`.

A view shows its figure at once, without ipywidgets too; the sliders draw it again. The figure is in
the cell's output beside the sliders, so a saved notebook shows it to those who run nothing.
"""

from IPython.display import display

from utils import (
    figures,
    overlap,
    overlap_figures,
    pipeline_figures,
    plots,
    rank_figures,
    server_figures,
    step_time,
    tensor_figures,
)


def show_view(draw, describe, make_sliders, **values):
    """Display `draw(**values)` under a slider for each value; returns nothing.

    `draw` draws a new figure, `describe` gives its alt text, both from the values by name.
    `make_sliders(ipywidgets)` returns {name: slider}; it is not called where ipywidgets is missing.
    """

    def picture(**values):
        draw(**values)
        return plots.picture(describe(**values))

    first = picture(**values)
    try:
        import ipywidgets
    except ImportError:
        display(first)
        return
    sliders = make_sliders(ipywidgets)
    image = ipywidgets.HTML(first.html)

    def redraw(change):
        image.value = picture(**{name: slider.value for name, slider in sliders.items()}).html

    for slider in sliders.values():
        slider.observe(redraw, "value")
    display(View(ipywidgets.VBox([*sliders.values(), image]), first))


class View:
    """Sliders with their figure where widgets run, the first figure where they do not."""

    def __init__(self, widget, first):
        self.widget, self.first = widget, first

    def _repr_mimebundle_(self, **options):
        return {**self.widget._repr_mimebundle_(**options), **self.first._repr_mimebundle_()}

    def __repr__(self):  # outside of notebooks
        return repr(self.first)


def ring_view(n=4, step=0):
    """Chapter 03: step through a ring all-reduce on n devices."""

    def make_sliders(ipywidgets):
        devices = ipywidgets.IntSlider(n, 2, 8, description="devices")
        steps = ipywidgets.IntSlider(step, 0, 2 * (n - 1), description="step")
        devices.observe(lambda change: setattr(steps, "max", 2 * (change["new"] - 1)), "value")
        return {"n": devices, "step": steps}

    show_view(figures.draw_ring, figures.describe_ring, make_sliders, n=n, step=step)


def all_reduce_view(bandwidth=16, n=8):
    """Chapter 03: the time of each all-reduce for another bandwidth and number of GPUs."""

    def make_sliders(ipywidgets):
        return {
            "bandwidth": ipywidgets.FloatLogSlider(
                bandwidth, min=0, max=2.7, step=0.1, description="GB/s", readout_format=".3g"
            ),
            "n": ipywidgets.SelectionSlider(
                value=n, options=[2, 3, 4, 8, 16, 32, 64], description="GPUs"
            ),
        }

    show_view(
        figures.draw_all_reduce_times, figures.describe_all_reduce_times, make_sliders,
        bandwidth=bandwidth, n=n,
    )  # fmt: skip


def step_time_view(network="ResNet-18", rows=256, gpus=8, server="dgx1-v100"):
    """Chapter 04: where a step's time goes for another batch, number of GPUs and server."""

    def make_sliders(ipywidgets):
        wide = {"style": {"description_width": "6em"}}
        return {
            "network": ipywidgets.Dropdown(
                value=network, options=list(step_time.NETWORKS), description="network", **wide
            ),
            "rows": ipywidgets.SelectionSlider(
                value=rows, options=[2**i for i in range(5, 14)], description="batch size", **wide
            ),
            "gpus": ipywidgets.SelectionSlider(
                value=gpus, options=[1, 2, 4, 8], description="GPUs", **wide
            ),
            "server": ipywidgets.Dropdown(
                value=server, options=["pcie-switch", "dgx1-v100", "dgx-a100", "hgx-h200"],
                description="server", **wide,
            ),
        }  # fmt: skip

    show_view(
        step_time.draw_step_times, step_time.describe_step_times, make_sliders,
        network=network, rows=rows, gpus=gpus, server=server,
    )  # fmt: skip


def algorithms_view(algorithm="ring", megabytes=1.0, n=8, wires="PCIe 3"):
    """Chapter 05: an all-reduce's time for another algorithm, size, number of ranks and wires."""

    def make_sliders(ipywidgets):
        return {
            "algorithm": ipywidgets.Dropdown(
                value=algorithm, options=list(rank_figures.COLOURS), description="algorithm"
            ),
            "megabytes": ipywidgets.FloatLogSlider(
                megabytes, min=-3, max=3, step=0.1, description="MB", readout_format=".3g"
            ),
            "n": ipywidgets.SelectionSlider(
                value=n, options=rank_figures.RANKS, description="ranks"
            ),
            "wires": ipywidgets.Dropdown(
                value=wires, options=list(rank_figures.WIRES), description="wires"
            ),
        }

    show_view(
        rank_figures.draw_algorithms, rank_figures.describe_algorithms, make_sliders,
        algorithm=algorithm, megabytes=megabytes, n=n, wires=wires,
    )  # fmt: skip


def stale_view(delay=3, rate=0.42):
    """Chapter 06: gradient descent with older gradients, at another learning rate."""

    def make_sliders(ipywidgets):
        return {
            "delay": ipywidgets.IntSlider(delay, 0, 8, description="delay"),
            "rate": ipywidgets.FloatSlider(
                rate, min=0.02, max=2.1, step=0.02, description="rate", readout_format=".2f"
            ),
        }

    show_view(
        server_figures.draw_stale_descent, server_figures.describe_stale_descent, make_sliders,
        delay=delay, rate=rate,
    )  # fmt: skip


def overlap_view(network="ResNet-18", megabytes=25.0, bandwidth=3.0):
    """Chapter 07: what hides and what does not with other buckets, wires and networks."""

    def make_sliders(ipywidgets):
        wide = {"style": {"description_width": "6em"}}
        return {
            "network": ipywidgets.Dropdown(
                value=network, options=list(overlap.NETWORKS), description="network", **wide
            ),
            "megabytes": ipywidgets.FloatLogSlider(
                megabytes, min=-2, max=3, step=0.1, description="bucket, MiB",
                readout_format=".3g", **wide,
            ),
            "bandwidth": ipywidgets.FloatLogSlider(
                bandwidth, min=-0.5, max=2.5, step=0.1, description="wire, GB/s",
                readout_format=".3g", **wide,
            ),
        }  # fmt: skip

    show_view(
        overlap_figures.draw_overlap, overlap_figures.describe_overlap, make_sliders,
        network=network, megabytes=megabytes, bandwidth=bandwidth,
    )  # fmt: skip


def pipeline_view(schedule="1F1B", stages=4, micro_batches=8, ratio=2.0):
    """Chapter 08: a pipeline's bars, bubble and memory for another schedule and other numbers."""

    def make_sliders(ipywidgets):
        wide = {"style": {"description_width": "8em"}}
        return {
            "schedule": ipywidgets.Dropdown(
                value=schedule, options=list(pipeline_figures.SCHEDULES), description="schedule",
                **wide,
            ),
            "stages": ipywidgets.IntSlider(stages, 1, 8, description="stages", **wide),
            "micro_batches": ipywidgets.IntSlider(
                micro_batches, 1, 32, description="micro-batches", **wide
            ),
            "ratio": ipywidgets.FloatSlider(
                ratio, min=0.5, max=4, step=0.5, description="backward / forward", **wide
            ),
        }  # fmt: skip

    show_view(
        pipeline_figures.draw_plan, pipeline_figures.describe_plan, make_sliders,
        schedule=schedule, stages=stages, micro_batches=micro_batches, ratio=ratio,
    )  # fmt: skip


def layer_view(width=4096, n=8, wires="NVLink 3 (A100)"):
    """Chapter 09: a split transformer block's time at another width, on other GPUs and wires."""

    def make_sliders(ipywidgets):
        return {
            "width": ipywidgets.SelectionSlider(
                value=width, options=[2**i for i in range(8, 17)], description="width"
            ),
            "n": ipywidgets.SelectionSlider(
                value=n, options=tensor_figures.GPUS[1:], description="GPUs"
            ),
            "wires": ipywidgets.Dropdown(
                value=wires, options=list(tensor_figures.WIRES), description="wires"
            ),
        }

    show_view(
        tensor_figures.draw_layer_times, tensor_figures.describe_layer_times, make_sliders,
        width=width, n=n, wires=wires,
    )  # fmt: skip
