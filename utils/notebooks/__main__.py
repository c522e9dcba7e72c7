"""Command line: python -m utils.notebooks run | check | saved | links [paths]."""

import argparse
import sys

from utils import notebooks
from utils.notebooks import links, rules, run, saved

COMMANDS = {"run": run.main, "check": rules.main, "saved": saved.main, "links": links.main}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m utils.notebooks",
        description=notebooks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("paths", nargs="*", help="notebooks; all chapters if none is named")
    arguments = parser.parse_args()
    return COMMANDS[arguments.command](notebooks.chapters(arguments.paths))


if __name__ == "__main__":
    sys.exit(main())
