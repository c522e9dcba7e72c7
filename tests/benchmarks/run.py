"""Run every bench_*.py beside this file in a process of its own: `make bench`.

Each of them is a script that prints a table, and exits with 1 where a stated limit is missed.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
COURSE = HERE.parent.parent


def main(folder):
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )
    environment = {**os.environ, "COURSE_DEVICES": "virtual"}
    failed = []
    for path in sorted(folder.glob("bench_*.py")):
        print(f"\n{path.stem.removeprefix('bench_')}\n", flush=True)
        command = [sys.executable, str(path.resolve())]
        done = subprocess.run(command, cwd=COURSE, env=environment)
        if done.returncode:
            failed.append(path.name)
    if failed:
        print(f"\nfailed, or missed a limit: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else HERE))
