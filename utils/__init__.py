"""Parallel Training from Scratch: the code that the chapters share.

    cluster = Cluster(4)            # several devices, driven by one program
    result = run(program, ranks=4)  # one program a device
"""

from .devices import Cluster
from .ranks import run

__all__ = ["Cluster", "run"]
