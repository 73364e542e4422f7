"""The scripts of examples/clusters, with small programs in place of jpipe, srun and scontrol."""

import os
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

from jpipe_train.config import shipped_configs

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "examples" / "clusters"
LIMIT = 60  # seconds, for what takes a tenth of one
SAVES = 'mkdir -p "$RUN/checkpoints/{}"'

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def programs(tmp_path):
    """Write programs that the scripts find before those of the system; the variable RUN names the run folder."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(**scripts: str) -> dict[str, str]:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_LOCAL"))}
        return kept | {"PATH": f"{folder}:{os.environ['PATH']}", "RUN": str(tmp_path / "run")}

    return write


@pytest.mark.parametrize("script", ["slurm.sh", "train-to-end.sh"])
def test_a_script_has_the_syntax_of_its_shell(script):
    shell = (CLUSTERS / script).read_text().split("\n")[0].removeprefix("#!/bin/")
    assert subprocess.run([shell, "-n", CLUSTERS / script], capture_output=True, check=False).stderr == b""


@pytest.mark.parametrize(
    ("jpipe", "code"),
    [
        (f"{SAVES.format(20)}; exit 0", 0),
        (f"{SAVES.format(7)}; exit 0", 75),  # saved before its end
        ("exit 2", 2),
        (f"{SAVES.format(20)}; exit 1", 1),
    ],
)
def test_the_exit_code_says_whether_a_run_is_finished(jpipe, code, programs, tmp_path):
    environment = programs(jpipe=f'echo "$@" > "$RUN.words"; {jpipe}')
    command = ["sh", CLUSTERS / "train-to-end.sh", environment["RUN"], "20", "a config.yaml", "--wait-limit", "9"]
    assert subprocess.run(command, env=environment, timeout=LIMIT, check=False).returncode == code
    run = environment["RUN"]
    assert Path(f"{run}.words").read_text() == f"train a config.yaml --wait-limit 9 --set run.dir={run} --set train.steps=20\n"


def test_a_signal_is_passed_on_and_the_run_is_saved(programs):
    saves = f"trap '{SAVES.format(7)}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    environment = programs(jpipe=saves)
    command = ["sh", CLUSTERS / "train-to-end.sh", environment["RUN"], "20", "config.yaml"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 75
        finally:
            process.kill()
    assert (Path(environment["RUN"]) / "checkpoints" / "7").is_dir()


def test_too_few_arguments_are_bad_input():
    done = subprocess.run(["sh", CLUSTERS / "train-to-end.sh", "run", "20"], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: train-to-end RUN STEPS CONFIG [OPTION ...]\n")


def submit(environment, tmp_path, errors="", **variables):
    """Run slurm.sh as SLURM does, and return its exit code and the words that srun and scontrol got.

    Args:
        errors: what standard error has; empty: nothing.
    """
    of_slurm = {"SLURM_JOB_ID": "4097", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}
    command = ["bash", CLUSTERS / "slurm.sh", "config.yaml", environment["RUN"], "20", "--set", "seed=1"]
    for name in ("srun", "scontrol"):
        (tmp_path / f"{name}.words").unlink(missing_ok=True)
    done = subprocess.run(
        command, env=environment | of_slurm | variables, cwd=tmp_path, timeout=LIMIT, capture_output=True, text=True, check=False
    )
    assert errors in done.stderr if errors else done.stderr == ""
    files = [tmp_path / f"{name}.words" for name in ("srun", "scontrol")]
    return done.returncode, *(file.read_text() if file.exists() else None for file in files)


SRUN = 'echo "$@; $JAX_LOCAL_DEVICE_IDS; ${#JPIPE_SECRET}" > srun.words; '
SCONTROL = 'echo "$@" > scontrol.words'


@pytest.mark.parametrize(
    ("srun", "code", "requeued"),
    [
        (f"{SAVES.format(20)}; exit 0", 0, False),
        (f"{SAVES.format(7)}; exit 0", 0, True),  # saved at SIGTERM
        ("exit 1", 0, True),
        ("exit 2", 2, False),
        ("exit 130", 130, False),
    ],
)
def test_an_unfinished_job_is_requeued(srun, code, requeued, programs, tmp_path):
    result, words, requeue = submit(programs(srun=SRUN + srun, scontrol=SCONTROL), tmp_path)
    run = tmp_path / "run"
    start = "--cpus-per-task=8 --kill-on-bad-exit=1 jpipe train config.yaml"
    assert words == f"{start} --set run.dir={run} --set train.steps=20 --set seed=1; ; 64\n"
    assert (result, requeue) == (code, "requeue 4097\n" if requeued else None)


def test_three_failures_in_a_row_end_the_job(programs, tmp_path):
    fails, saves = SRUN + "exit 1", SRUN + f"{SAVES.format(7)}; exit 0"
    codes = []
    for srun in (fails, fails, saves, fails, fails, fails):
        code, _, requeue = submit(programs(srun=srun, scontrol=SCONTROL), tmp_path)
        codes.append((code, requeue is not None))
    assert codes == [(0, True)] * 5 + [(1, False)]


HOSTILE = "a[$(touch hacked)]"


@pytest.mark.parametrize(
    ("content", "counted"),
    [(HOSTILE, "1"), (f"2+{HOSTILE}", "1"), ("2\ntouch hacked", "1"), ("srun", "1"), ("", "1"), ("9" * 99, "1"), ("08", "9")],
)
def test_a_number_is_all_that_is_read_from_the_file_of_failures(content, counted, programs, tmp_path):
    """In $((…)) bash would run a command that stands in the value of a variable."""
    failures = tmp_path / "run.failures"
    failures.write_text(content)
    environment = programs(srun=SRUN + "exit 1", scontrol=SCONTROL)
    submit(environment, tmp_path)
    assert failures.read_text() == f"{counted}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["bin", "run.failures", "srun.words", *(["scontrol.words"] if counted == "1" else [])]
    )


def test_the_file_of_failures_is_replaced_where_it_is_a_link(programs, tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "run.failures").symlink_to(other)
    submit(programs(srun=SRUN + "exit 1", scontrol=SCONTROL), tmp_path)
    assert (other.read_text(), (tmp_path / "run.failures").read_text()) == ("kept", "1\n")


# Where a stranger's text could be run, or could lead a write elsewhere.
RISKS = re.compile(
    r"""\beval\b | \blet\b | ` | [\s"=>]/tmp/(?!wheels|constraints)  # a name in /tmp that others can guess; the image has no others
    | \(\(\s* (?!failures\b | 10\#\$count\b | SLURM_GPUS_ON_NODE\b) [\w$]  # arithmetic, but of these, which have digits alone""",
    re.VERBOSE,
)


def shell_examples():
    """Yield (name, text) of each shell script that is shipped, run by continuous integration, or shown on a page."""
    for path in [*CLUSTERS.iterdir(), *(ROOT / ".ci").iterdir()]:
        if path.is_file() and (
            path.suffix == ".sh" or path.name == "Dockerfile" or path.read_text().startswith(("#!/bin/", "#!/usr/bin/env bash"))
        ):
            yield path.name, path.read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            yield f"{page.stem} {number}", block


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in shell_examples()])
def test_no_shell_example_runs_text_or_writes_to_a_name_that_others_can_guess(text):
    code = re.sub(r"(^|\s)#.*", "", text)
    assert not RISKS.search(code), RISKS.search(code)


def test_one_task_of_a_node_has_all_its_gpus(programs, tmp_path):
    environment = programs(srun=SRUN + SAVES.format(20), scontrol=SCONTROL)
    _, words, _ = submit(environment, tmp_path, SLURM_NTASKS_PER_NODE="1")
    assert "; 0,1,2,3; " in words
    _, words, _ = submit(environment, tmp_path, SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="")
    assert "; ; " in words


def test_a_number_of_gpus_is_not_computed(programs, tmp_path):
    environment = programs(srun=SRUN + SAVES.format(20), scontrol=SCONTROL)
    submit(environment, tmp_path, SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE=HOSTILE, errors="integer")
    assert not (tmp_path / "hacked").exists()


def test_the_image_has_every_file_that_it_copies_and_that_the_wheel_needs():
    text = (CLUSTERS / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert not [name for name in copied if not (ROOT / name).exists()]
    project = (ROOT / "pyproject.toml").read_text()
    wheel = project.split("[tool.hatch.build.targets.wheel]")[1].split("[tool.hatch.build.targets.sdist]")[0]
    needed = {name.split("/")[0] for name in re.findall(r'"([\w/]+)"', wheel.split("\n")[1])} | set(re.findall(r"^(\w+) = \"", wheel, re.M))
    needed |= set(re.findall(r'^(?:readme|license-files) = \[?"([\w.]+)"', project, re.MULTILINE)) | {"pyproject.toml"}
    assert needed - {"packages"} <= {*copied}, needed
    for name in re.findall(r"^COPY --from=build /source/(\S+)", text, re.MULTILINE):
        assert name in copied or (name.split("/")[0] in copied and (ROOT / name).exists()), name
    extras = set(re.findall(r"^(\w[\w-]*) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE))
    assert {extra for named in re.findall(r"EXTRA=([\w,]+)", text) for extra in named.split(",")} <= extras
    user, *later = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user.split(":")[0].isdecimal()
    assert later == []


def test_the_image_installs_the_versions_that_are_tested():
    text, project = (CLUSTERS / "Dockerfile").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, extras = (re.search(rf"^ARG {name}=(\S+)$", text, re.MULTILINE)[1] for name in ("PYTHON", "EXTRA"))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {pin.name.lower(): pin.specifier for pin in pinned if pin.marker is None or pin.marker.evaluate({"python_version": python})}
    wanted = [*project["dependencies"], *(name for extra in extras.split(",") for name in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        (pin,) = pins[requirement.name.lower()]
        assert pin.version in requirement.specifier, requirement
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"] == pins["jax-cuda13-pjrt"]


@pytest.mark.slow
def test_the_wheel_is_built_from_what_the_image_copies_alone(tmp_path):
    text = (CLUSTERS / "Dockerfile").read_text()
    for name in " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)).split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    alone, whole = ({file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()} for root in (tmp_path, ROOT))
    assert alone == whole
    assert any(name.endswith("shipped/configs/recipes/qwen3-0.6b-lora-24gb.yaml") for name in alone)


def test_all_files_are_shipped():
    files = {path.relative_to(ROOT).as_posix() for path in CLUSTERS.iterdir() if path.is_file()}
    assert files <= shipped_configs.shipped().keys()
