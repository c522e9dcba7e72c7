"""Parallel Training from Scratch: the code that the chapters share.

It has two doors, one for a program that drives several devices, one for a program on each of them:

    cluster = Cluster(4)
    result = run(program, ranks=4)
"""

from .devices import Cluster
from .ranks import run

__all__ = ["Cluster", "run"]
