"""A user's files named `train.py`, `planner.py` and `data.py` work beside jpipe; one named `jpipe.py` is refused."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FILES = {
    "planner.py": "WIDTH = 2\n",
    "data.py": """
import numpy as np
class Batches:
    def __init__(self, batch_size): self.batch = np.ones((batch_size, 2), np.float32), np.zeros(batch_size, np.int32)
    def __len__(self): return 1
    def __getitem__(self, t): return self.batch
def batches(seed, batch_size): return Batches(batch_size), Batches(batch_size)
""",
    "train.py": """
from flax import nnx
import data, jpipe, planner
def layers():
    print("layers of", data.__name__, planner.__name__, __name__)
    return jpipe.LayerStack({f"layer {n}": lambda rngs: nnx.Linear(planner.WIDTH, planner.WIDTH, rngs=rngs) for n in range(2)})
""",
    "config.yaml": """
model: {target: "train:layers"}
data: {target: "data:batches"}
train: {steps: 1, batch_size: 4, eval_every: 1, trace_batches: 0}
plan: {num_stages: 2, microbatches: 2}
run: {dir: run}
compile_cache: null
log: []
""",
    "script.py": """
import sys
import data, planner, train
from jpipe_train.cli import main
sys.exit(main(sys.argv[1:]))
""",
}
CONSOLE = Path(sysconfig.get_path("scripts"), "jpipe")


@pytest.fixture
def home(tmp_path):
    """Return a folder with a user's files."""
    for name, text in FILES.items():
        (tmp_path / "home" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "home" / name).write_text(text)
    return tmp_path / "home"


def start(home: Path, way: str, where: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start jpipe in a user's folder, or in another one with the user's folder on PYTHONPATH."""
    program = {"module": ["-m", "jpipe_train.cli"], "console": [str(CONSOLE)], "script": [str(home / "script.py")]}[way]
    folder = home if where == "current folder" else home.with_name("elsewhere")
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(home)} if where == "PYTHONPATH" else {}
    return subprocess.run([sys.executable, *program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("way", ["module", "console", "script"])
def test_files_named_train_planner_and_data_are_the_users(home, way, where):
    done = start(home, way, where, "train", str(home / "config.yaml"), "--allow-code")
    assert done.returncode == 0, done.stderr
    assert "layers of data planner train\n" in done.stdout


@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("way", ["module", "console", "script"])
def test_a_file_named_jpipe_is_refused_before_it_is_imported(home, way, where):
    shadow = home / "jpipe.py"
    shadow.write_text("raise SystemExit('imported')\n")
    for name in ("train.py", "data.py", "planner.py"):
        (home / name).write_text("")
    done = start(home, way, where, "--version")
    if (way, where) == ("console", "current folder"):  # the command does not import from the current folder
        assert (done.returncode, done.stderr) == (0, "")
    else:
        message = f"jpipe: Python imports '{shadow}' in place of the package jpipe; rename this file, or start jpipe in another folder\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_folder_named_jpipe_is_refused_like_a_file(home):
    (home / "jpipe").mkdir()
    (home / "jpipe" / "__init__.py").touch()
    done = start(home, "module", "current folder", "--version")
    message = (
        f"jpipe: Python imports '{home / 'jpipe'}' in place of the package jpipe; rename this folder, or start jpipe in another folder\n"
    )
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.slow
def test_processes_of_launch_import_what_the_command_imports(home):
    """The current folder, where a module may have the name of a library, is not searched."""
    (home / "optax.py").write_text("raise SystemExit('imported')\n")
    done = start(home, "console", "current folder", "launch", "-n", "1", "--", "train", "missing.yaml")
    message = "jpipe: missing.yaml: cannot read the config: No such file or directory; give a YAML file such as configs/gpt-bytes.yaml"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (2, "", message)
