"""The set-up: what is declared agrees, and what can go wrong is said in words that help."""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import packages_distributions, version
from pathlib import Path

import psutil
import pytest
import rattler
import yaml
from packaging.requirements import Requirement

from utils import install
from utils.notebooks import COURSE, chapters, links, rules

PROJECT = (COURSE / "pyproject.toml").read_text(encoding="utf-8")
CONDA = (COURSE / "environment.yml").read_text(encoding="utf-8")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def declared(name):
    """The requirements in one list of pyproject.toml."""
    body = re.search(rf"^{name} = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)[1]
    return [Requirement(text) for text in re.findall(r'^\s*"([^"]+)"', body, re.MULTILINE)]


REQUIREMENTS = declared("dependencies") + declared("test")


# What is declared


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_ranges_admit_what_is_installed(requirement):
    assert requirement.specifier, "no lower bound"
    assert version(requirement.name) in requirement.specifier


def test_ranges_admit_the_tested_versions():
    header = PROJECT[PROJECT.index("Tested with") : PROJECT.index("[build-system]")]
    tested = dict(re.findall(r"([\w-]+) (\d[\d.]*\d)", header))
    by_name = {requirement.name: requirement.specifier for requirement in REQUIREMENTS}
    assert {"torch", "numpy", "pandas", "jupyterlab", "nbval"} <= set(tested)
    assert tested["d2l"] == install.D2L.partition("==")[2]
    for name in set(tested) - {"Python", "d2l"}:
        assert tested[name] in by_name[name]


def imported(source):
    """The top-level packages that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def undeclared(sources, allowed):
    """Imports, by file, of packages that are neither Python's own nor the course's nor allowed."""
    ours = {"utils", "tests", "google", "conftest", *sys.stdlib_module_names}
    distributions = packages_distributions()
    for file, source in sources.items():
        for name in set(imported(source)) - ours:
            found = {text.lower().replace("_", "-") for text in distributions.get(name, [name])}
            if not found & allowed:
                yield f"{file} imports {name}"


def cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines += [line for line in cell["source"] if not line.lstrip().startswith(("%", "!"))]
            lines.append("\n")
    return "".join(lines)


def test_imports_are_declared():
    course = {requirement.name for requirement in declared("dependencies")} | {"d2l"}
    every = course | {requirement.name for requirement in declared("test")}
    tools = COURSE / "utils/notebooks"
    modules = [path for path in COURSE.glob("utils/**/*.py") if tools not in path.parents]
    lessons = {path.name: path.read_text() for path in modules}
    lessons |= {path.name: cells(path) for path in chapters()}
    rest = {path.name: path.read_text() for path in COURSE.glob("tests/**/*.py")}
    rest |= {path.name: path.read_text() for path in tools.glob("*.py")}
    assert list(undeclared(lessons, course)) == []
    assert list(undeclared(rest, every | {"packaging"})) == []
    assert list(undeclared({"x.py": "def f():\n    import nbgrader.api"}, every))


def test_d2l_is_the_same_everywhere():
    texts = {"pyproject.toml": PROJECT, "environment.yml": CONDA, "Colab": links.colab_cell()}
    readme = COURSE / "README.md"
    if readme.exists():
        texts["README.md"] = readme.read_text(encoding="utf-8")
    for name, text in texts.items():
        found = set(re.findall(r"d2l==[\d.]+\d", text))
        assert found <= {install.D2L}, name
        assert found or name == "README.md"


def test_no_file_names_a_package_index():
    kinds = ("*.py", "*.md", "*.yml", "*.toml", "*.cfg", "Makefile", ".ci/run", ".gitignore")
    ours = [COURSE / "utils", COURSE / "tests", COURSE / "chapters"]
    files = [path for kind in kinds for path in COURSE.glob(kind)]
    files += [path for kind in kinds for folder in ours for path in folder.rglob(kind)]
    assert len(files) > 10
    for path in set(files) - {COURSE / "tests/test_notebook_rules.py"}:
        assert not rules.INDEX.search(path.read_text(encoding="utf-8")), path


def conda_specs(text):
    """Conda's package specs of an environment.yml, read as conda reads them; its pip part."""
    parts = yaml.safe_load(text)["dependencies"]
    specs = [rattler.MatchSpec(part, strict=True) for part in parts if isinstance(part, str)]
    [pip] = [part["pip"] for part in parts if isinstance(part, dict)]
    return {spec.name.normalized: str(spec.version) for spec in specs}, pip


def test_environment_yml_is_what_conda_reads():
    specs, pip = conda_specs(CONDA)
    assert set(specs) == {"python", "pip", "make"}
    oldest = re.search(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)[1]
    assert specs["python"].startswith(oldest + ",")
    assert oldest == ">=" + ".".join(map(str, install.OLDEST))
    assert pip == ["--editable .[test]"], "packages are declared in pyproject.toml only"
    assert f"pip install --no-deps {install.D2L}" in CONDA


def test_environment_yml_check_can_fail():
    with pytest.raises(Exception, match="version spec"):
        conda_specs(CONDA.replace("pip >=23.1", "pip =>23.1"))
    with pytest.raises(ValueError):
        conda_specs(CONDA.replace("  - pip:\n      - --editable .[test]\n", ""))


# The set-up, with stand-ins for pip, Python and conda

PIP = """\
import os, pathlib, sys, time
here = pathlib.Path(sys.prefix)
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (here / "fails").exists():
    pathlib.Path(sys.argv[sys.argv.index("--log") + 1]).write_text((here / "fails").read_text())
    sys.exit(1)
if (here / "hangs").exists():
    (here / "hanging").touch()
    time.sleep(60)
"""


class SetUp:
    """`make setup` in a folder that holds only what it needs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "utils").mkdir(parents=True)
        for file in ("Makefile", "pyproject.toml", "utils/install.py"):
            shutil.copy(COURSE / file, folder / file)
        drop = ("CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHON", "MAKEFLAGS", "MAKELEVEL")
        self.environment = {k: v for k, v in os.environ.items() if k not in drop}

    def python(self, name):
        """A virtual environment whose pip only notes its calls."""
        place = self.folder / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        [packages] = place.glob("lib/python*/site-packages")
        for module, text in {"pip": PIP, "torch": ""}.items():
            (packages / module).mkdir()
            (packages / module / "__init__.py").touch()
            (packages / module / "__main__.py").write_text(text)
        return place

    def command(self, *arguments, **environment):
        return {
            "args": ["make", "setup", *arguments],
            "cwd": self.folder,
            "env": {**self.environment, **environment},
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }

    def make(self, *arguments, **environment):
        done = subprocess.run(**self.command(*arguments, **environment), timeout=100)
        return done.returncode, done.stdout


@pytest.fixture
def setup(tmp_path):
    return SetUp(tmp_path / "the course")


def calls(place):
    file = place / "calls"
    return file.read_text().splitlines() if file.exists() else []


def stamp(place):
    return (place / "course-setup.stamp").exists()


def test_installs_once_and_again_when_requirements_change(setup):
    place = setup.python("my env")
    named = f"PYTHON={place}/bin/python"
    code, said = setup.make(named)
    assert code == 0 and f"ready: {place}/bin/python" in said
    first, second = calls(place)
    assert "--editable .[test]" in first
    assert second.endswith(f"--no-deps {install.D2L}")
    assert setup.make(named)[0] == 0 and len(calls(place)) == 2

    project = setup.folder / "pyproject.toml"
    project.write_text(PROJECT.replace("line-length = 100", "line-length = 99"))
    assert setup.make(named)[0] == 0 and len(calls(place)) == 2
    project.write_text(PROJECT.replace('"torch>=', '"torch>=2.0,>='))
    assert setup.make(named)[0] == 0 and len(calls(place)) == 4


def test_uses_the_active_conda_environment_but_not_base(setup):
    conda, own = setup.python("conda"), setup.python(".venv")
    active = {"CONDA_PREFIX": str(conda), "CONDA_DEFAULT_ENV": "parallel-training"}
    assert f"ready: {conda}/bin/python" in setup.make(**active)[1]
    assert stamp(conda) and not stamp(own)
    active["CONDA_DEFAULT_ENV"] = "base"
    assert f"ready: {own}/bin/python" in setup.make(**active)[1]
    active.update(CONDA_PREFIX=str(setup.folder), CONDA_DEFAULT_ENV="empty")
    code, said = setup.make(**active)
    assert code and "has no Python" in said and "conda install python" in said


def heed_interrupts():
    """A shell that runs the tests in the background has its children ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_installation_leaves_no_stamp(setup):
    place = setup.python(".venv")
    (place / "hangs").touch()
    running = subprocess.Popen(
        **setup.command(), start_new_session=True, preexec_fn=heed_interrupts
    )
    while not (place / "hanging").exists():
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, 2)
    said, _ = running.communicate(timeout=30)
    assert running.returncode and "Interrupted" in said
    assert not stamp(place) and not (place / "course-setup").exists()
    (place / "hangs").unlink()
    assert setup.make()[0] == 0 and stamp(place)


@pytest.mark.parametrize(
    "log, advice",
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("NewConnectionError(...): [Errno 111] Connection refused", "A download failed"),
        ("ReadTimeoutError: Read timed out. (read timeout=15)", "A download failed"),
        ("ERROR: No matching distribution found for torch>=2.6", "has no release for this Python"),
        ("error: something new", "for the reason that pip gives above"),
    ],
)
def test_failed_installation_is_explained(setup, log, advice):
    place = setup.python(".venv")
    (place / "fails").write_text(log)
    code, said = setup.make()
    assert code and advice in said
    assert not stamp(place) and len(calls(place)) == 1


def test_real_pip_without_network_is_explained(setup):
    """Also makes a real .venv, over the remains of a broken one."""
    (setup.folder / ".venv" / "bin").mkdir(parents=True)
    (setup.folder / ".venv" / "bin" / "python").symlink_to("/nowhere/python3")
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1", "PIP_FIND_LINKS": ""}
    install_py = setup.folder / "utils/install.py"
    install_py.write_text(re.sub(r"DISK = .*", "DISK = 0", install_py.read_text()))
    code, said = setup.make(**closed, PIP_CONFIG_FILE=os.devnull, PIP_EXTRA_INDEX_URL="")
    assert code
    assert "making it anew" in said and "A download failed" in said, said
    assert not stamp(setup.folder / ".venv")


def stand_in(folder, name, version):
    """A Python of another version."""
    folder.mkdir(exist_ok=True)
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit\nexit 1\n'
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    return folder / name


def test_old_and_missing_pythons_are_named(setup):
    old = stand_in(setup.folder / "old", "python3", "3.9.18")
    code, said = setup.make(f"PYTHON={old}")
    assert code and "needs Python 3.10 or newer" in said and "Python 3.9.18" in said
    only = setup.folder / "only"
    only.mkdir()
    for name in ("make", "sh"):
        (only / name).symlink_to(shutil.which(name))
    code, said = setup.make(PATH=str(only))
    assert code and "python3: not there" in said and "PYTHON=/path/to/python3" in said


def test_another_python_than_the_one_of_venv(setup):
    setup.python(".venv")
    found = {"version": (3, 99), "pip": True}
    problem = said_by(
        lambda: install.make_venv(asked=True),
        probe=lambda python: found,
        VENV=setup.folder / ".venv",
    )
    assert ".venv was made with Python 3.99" in problem and "clean-all" in problem


def said_by(call, **replaced):
    """What install.py says before it stops, some of its names replaced."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "say", said.append)
        for name, value in replaced.items():
            patch.setattr(install, name, value)
        with pytest.raises(SystemExit) as stopped:
            call()
    assert stopped.value.code == 1
    return "\n".join(said)


def test_missing_venv_module_is_named(tmp_path):
    problem = said_by(
        lambda: install.make_venv(asked=False),
        VENV=tmp_path / ".venv",
        find_spec=lambda name: None if name == "ensurepip" else importlib.util.find_spec(name),
    )
    assert "no module ensurepip" in problem
    if Path("/etc/debian_version").exists():
        assert "apt install python3-venv" in problem
    assert not (tmp_path / ".venv").exists()


def test_full_disk_is_seen_before(tmp_path):
    problem = said_by(lambda: install.check_disk(tmp_path, needed=10**6))
    assert "1000000 GB" in problem and "Make room" in problem
    assert "GB are free on the disk" in problem
    install.check_disk(tmp_path, needed=0)


def test_environment_without_pip(tmp_path):
    bare = {"version": (3, 12), "prefix": str(tmp_path), "pip": False, "torch": True}
    replaced = {"find_environment": lambda: "my-python", "probe": lambda python: bare}
    assert "my-python -m ensurepip" in said_by(install.main, **replaced)
    bare.update(pip=True, version=(3, 9))
    assert "my-python is 3.9" in said_by(install.main, **replaced)


# The commands


def test_help_is_the_default_and_lists_every_target():
    def said(*arguments):
        return subprocess.run(["make", *arguments], cwd=COURSE, capture_output=True, text=True)

    targets = re.search(r"^\.PHONY: (.*)", (COURSE / "Makefile").read_text(), re.MULTILINE)[1]
    assert said().stdout == said("help").stdout
    for target in targets.split():
        assert re.search(rf"^  {target} +\w", said().stdout, re.MULTILINE), target


def test_bench_runs_every_script_and_tells_which_failed(tmp_path):
    (tmp_path / "bench_a.py").write_text("raise SystemExit(1)")
    (tmp_path / "bench_b.py").write_text("import os; print('table', os.environ['COURSE_DEVICES'])")
    (tmp_path / "other.py").write_text("print('not a benchmark')")
    bench = [sys.executable, str(COURSE / "tests/benchmarks/run.py"), str(tmp_path)]
    done = subprocess.run(bench, capture_output=True, text=True)
    assert done.returncode == 1
    assert "table virtual" in done.stdout and "not a benchmark" not in done.stdout
    assert done.stdout.endswith("failed, or missed a limit: bench_a.py\n")
    (tmp_path / "bench_a.py").unlink()
    assert subprocess.run(bench, capture_output=True).returncode == 0


def test_ci_brings_what_a_bare_machine_lacks(tmp_path):
    """With stand-ins: no chromium, a python3 without venv, apt-get that fails once."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(COURSE / ".ci/run", tmp_path / ".ci/run")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "env"):
        (tools / name).symlink_to(shutil.which(name))
    scripts = {
        "python3": "exit 1",
        "id": "echo 0",
        "sleep": "exit 0",
        "make": 'echo "make $*"; exit 7',
        "apt-get": 'echo "$*" >> apt; [ -e tried ] || { : > tried; exit 100; }',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env={"PATH": str(tools)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "make test"
    assert done.returncode == 7, "make's exit status is the script's"
    asked = (tmp_path / "apt").read_text().splitlines()
    assert asked[0] == "update -qq"
    assert asked[-1].endswith("--no-install-recommends chromium python3 python3-venv")


def answer(url):
    """A server's JSON, as soon as it listens."""
    for _ in range(100):
        try:
            with urllib.request.urlopen(url) as reply:
                return json.load(reply)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(url)


def test_lab_opens_on_loopback_with_a_token(tmp_path, free_port):
    complete = Path(sys.prefix, "course-setup.stamp")
    if not complete.exists() or complete.read_text() != install.requirements():
        pytest.skip("this environment was not made by `make setup`, which would install into it")
    port = free_port()
    lab = subprocess.Popen(
        [
            "make",
            "lab",
            f"PYTHON={sys.executable}",
            f"LAB_ARGS=--no-browser --ServerApp.port={port} --ServerApp.port_retries=0",
        ],
        cwd=COURSE,
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        for line in lab.stdout:
            if found := re.search(rf"http://127.0.0.1:{port}/lab/tree/chapters\?token=(\w+)", line):
                break
        else:
            pytest.fail("the address with its token was not printed")
        server = f"http://127.0.0.1:{port}/api/contents"
        names = {entry["name"] for entry in answer(f"{server}?token={found[1]}")["content"]}
        assert {"utils", "Makefile"} <= names
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(server)
        listening = {
            connection.laddr.ip
            for process in [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(True)]
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
    finally:
        os.killpg(lab.pid, 15)
        lab.communicate(timeout=30)


@pytest.mark.environment
@pytest.mark.timeout(1800)
def test_pip_part_of_environment_yml_installs(tmp_path):
    """For real, in a fresh environment: network, 7 GB of disk, minutes."""
    course = tmp_path / "course"
    course.mkdir()
    for file in ("pyproject.toml", "LICENSE", "LICENSE-text"):
        shutil.copy(COURSE / file, course)
    shutil.copytree(COURSE / "utils", course / "utils")
    _, pip = conda_specs(CONDA)
    (course / "requirements.txt").write_text("\n".join(pip))
    second = re.search(r"^#\s+pip (install --no-deps .*)$", CONDA, re.MULTILINE)[1]
    try:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
        python = tmp_path / "fresh" / "bin" / "python"
        for step in ("install -r requirements.txt", second):
            subprocess.run([python, "-m", "pip", *step.split()], cwd=course, check=True)
        for code in (
            "import jupyterlab, ipywidgets, matplotlib, mlxtend, nbval, numpy, pandas, torchvision",
            "from d2l import torch as d2l; assert d2l.torch.ones(2).sum() == 2",
            "import utils, pathlib; print(utils.__file__); assert 'course' in utils.__file__",
        ):
            subprocess.run([python, "-c", code], cwd=tmp_path, check=True)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
