"""Command line: python -m utils.notebooks run | check | saved | links | cover [paths]."""

import argparse
import importlib
import sys

from utils import notebooks

MODULES = {"run": "run", "check": "rules", "saved": "saved", "links": "links", "cover": "cover"}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m utils.notebooks",
        description=notebooks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=MODULES)
    parser.add_argument("paths", nargs="*", help="notebooks; all chapters if none is named")
    arguments = parser.parse_args()
    module = importlib.import_module(f"utils.notebooks.{MODULES[arguments.command]}")
    return module.main(notebooks.chapters(arguments.paths))


if __name__ == "__main__":
    sys.exit(main())
