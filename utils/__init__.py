"""Parallel Training from Scratch: the code that the chapters share.

from utils import Cluster
cluster = Cluster(4)
"""

from .devices import Cluster
from .ranks import run

__all__ = ["Cluster", "run"]
