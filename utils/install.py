"""Complete the course's environment, then print its interpreter: the set-up of all `make` targets.

Runs with any Python from 3.10 and nothing installed. A stamp inside the environment says for which
requirements it is complete; as long as they are the same, nothing is installed and no network used.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

COURSE = Path(__file__).resolve().parent.parent
VENV = COURSE / ".venv"
D2L = "d2l==1.0.3"  # without its pins, which are of 2023; it works with current packages
OLDEST = (3, 10)
# Free disk for a first installation, GB: the environment, and the downloads while they unpack.
# Linux needs more because torch brings CUDA's libraries along.
DISK = 11 if platform.system() == "Linux" else 3

CAUSES = (  # what pip's log says, what the reader can do
    (
        ("No space left on device", "Errno 28"),
        "The disk is full. Make room (about {disk} GB) and run the same command again.",
    ),
    (
        (
            "NewConnectionError",
            "NameResolutionError",
            "Max retries exceeded",
            "ConnectTimeout",
            "ReadTimeout",
            "Read timed out",
            "ProxyError",
            "SSLError",
            "Connection broken",
            "IncompleteRead",
        ),
        "A download failed. Check the network (behind a proxy, set HTTPS_PROXY) and run the same "
        "command again; finished downloads are kept.",
    ),
    (
        ("No matching distribution found", "Could not find a version"),
        "A package, named above, has no release for this Python ({python}) or this machine "
        "({machine}). Try another Python: make lab PYTHON=python3.12",
    ),
)


def say(message):
    print(message, file=sys.stderr, flush=True)


def stop(message):
    say("\n" + message)
    raise SystemExit(1)


def probe(python):
    """What an interpreter is and has; None if it does not start."""
    code = (
        "import importlib.util as u, json, os, sys; "
        "own = sys.prefix != sys.base_prefix or os.path.isdir(sys.prefix + '/conda-meta'); "
        "print(json.dumps(dict(version=sys.version_info[:2], prefix=sys.prefix, environment=own, "
        "pip=bool(u.find_spec('pip')), torch=bool(u.find_spec('torch')))))"
    )
    try:
        done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True)
        return json.loads(done.stdout)
    except (OSError, ValueError):
        return None


def find_environment():
    """The interpreter of the environment to use; makes .venv if it is the one and is missing."""
    asked = os.environ.get("COURSE_PYTHON")
    if asked and probe(sys.executable)["environment"]:
        return sys.executable
    prefix = os.environ.get("CONDA_PREFIX")
    if prefix and not asked and os.environ.get("CONDA_DEFAULT_ENV") != "base":
        python = Path(prefix, "bin", "python")
        if not python.exists():
            stop(
                f"The active conda environment {prefix} has no Python.\n"
                "Install one (conda install python), make the course's own environment\n"
                "(conda env create -f environment.yml), or conda deactivate to use .venv."
            )
        return str(python)
    return make_venv(asked)


def make_venv(asked):
    python = VENV / "bin" / "python"
    found = probe(python) if python.exists() else None
    if found and asked and tuple(found["version"]) != sys.version_info[:2]:
        stop(
            ".venv was made with Python {}.{} and PYTHON is {}.{}: to change, "
            "`make clean-all` first.".format(*found["version"], *sys.version_info[:2])
        )
    if found and found["pip"]:
        return str(python)
    if VENV.exists():
        say(".venv is incomplete or its Python is gone: making it anew")
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if missing:
        debian = "`sudo apt install python3-venv` mends that on Debian and Ubuntu.\n"
        stop(
            f"{sys.executable} cannot make a virtual environment: no module {', '.join(missing)}.\n"
            + (debian if Path("/etc/debian_version").exists() else "")
            + "Another Python can be named: make lab PYTHON=/path/to/python3"
        )
    check_disk(VENV.parent, DISK)
    say(f"Making .venv with Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        stop("Making .venv failed, for the reason above.")
    return str(python)


def check_disk(folder, needed):
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed:
        stop(
            f"{free:.1f} GB are free on the disk of {folder}, and a first installation needs about "
            f"{needed} GB (most of it torch).\nMake room, or move the course to a larger disk."
        )


def requirements():
    """What decides whether an environment is complete, as one hash."""
    project = (COURSE / "pyproject.toml").read_text(encoding="utf-8")
    declared = project.split("\n[tool.ruff", 1)[0]  # settings of tools install nothing
    return hashlib.sha256("\n".join([declared, D2L, str(COURSE)]).encode()).hexdigest()


def pip(python, found, *arguments):
    """Run pip of the environment; explain a failure in the reader's terms."""
    scratch = Path(found["prefix"], "course-setup")  # /tmp may be a small disk in memory
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    log = scratch / "pip.log"
    command = [python, "-m", "pip", "--disable-pip-version-check", "--log", str(log), "install"]
    if not sys.stderr.isatty():
        command += ["--quiet", "--progress-bar", "off"]
    environment = dict(os.environ, TMPDIR=str(scratch))
    try:
        code = subprocess.run(
            command + list(arguments), cwd=COURSE, env=environment, stdout=sys.stderr
        ).returncode
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not code:
        return
    for signs, advice in CAUSES:
        if any(sign in text for sign in signs):
            version = ".".join(map(str, found["version"]))
            stop(advice.format(disk=DISK, python=version, machine=platform.machine()))
    stop("Installing failed, for the reason that pip gives above. Nothing is marked as complete.")


def main():
    python = find_environment()
    found = probe(python)
    if not found:
        stop(f"{python} does not start.")
    if tuple(found["version"]) < OLDEST:
        stop(
            "The course needs Python 3.10 or newer; {} is {}.{}.".format(python, *found["version"])
        )
    if not found["pip"]:
        stop(f"{python} has no pip. Run `{python} -m ensurepip`, then the same command again.")
    stamp = Path(found["prefix"], "course-setup.stamp")
    complete = requirements()
    if not stamp.exists() or stamp.read_text() != complete:
        stamp.unlink(missing_ok=True)
        if not found["torch"]:
            check_disk(found["prefix"], DISK)
        say(f"Installing the course into {found['prefix']}: minutes, the first time")
        pip(python, found, "--editable", ".[test]")
        pip(python, found, "--no-deps", D2L)
        partial = stamp.with_suffix(".part")
        partial.write_text(complete)
        partial.replace(stamp)
    print(python)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("Interrupted. Run the same command again to go on.")
