"""Published sweeps: as other columns of the same tables, and as the chapter's text has them."""

import numpy as np
import pytest

from utils import costs
from utils.measure import fit_line, relative_errors
from utils.published import ALL_REDUCE

GB = 1e9

# The tables' own column "busbw", GB/s, which was not used to write the times down.
CHECKED = [2**15, 2**20, 2**23, 2**26, 2**30, 2**34]
BUS_BANDWIDTHS = {
    "8 A100": (1.31, 18.00, 109.93, 171.54, 229.04, 234.89),
    "8 H200": (1.44, 39.93, 155.53, 346.51, 463.58, 482.26),
}


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_times_and_bus_bandwidths_of_the_tables_agree(name):
    for size, expected in zip(CHECKED, BUS_BANDWIDTHS[name]):
        found = costs.bus_bandwidth(size, ALL_REDUCE[name][size], 8) / GB
        assert found == pytest.approx(expected, rel=0.006)


@pytest.mark.parametrize(
    "name, worst, at", [("8 A100", -0.36, 2**20), ("8 H200", -0.21, 2**23)], ids=str
)
def test_one_line_misses_by_what_the_chapter_says(name, worst, at):
    sizes, seconds = list(ALL_REDUCE[name]), list(ALL_REDUCE[name].values())
    line = fit_line(sizes, seconds)
    errors = relative_errors([line(size) for size in sizes], seconds)
    place = int(np.argmax(np.abs(errors)))
    assert sizes[place] == at
    assert errors[place] == pytest.approx(worst, abs=0.005)
