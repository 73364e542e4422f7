"""Files are written atomically and never through a symbolic link; paths resolve like the system's."""

import os
import re
import stat
from pathlib import Path

import pytest

from jpipe import InputError, checkpoints, files
from tests.packages import PACKAGES


@pytest.fixture
def victim(tmp_path):
    """Return a file of the user's outside the folder that is written to."""
    (tmp_path / "folder").mkdir()
    file = tmp_path / "profile.sh"
    file.write_text("mine")
    return file


def test_a_file_is_replaced_atomically_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    file = tmp_path / ("n" * 255)  # as long as a name can be
    files.write_atomically(file, "one")
    files.write_atomically(file, b"two")
    assert file.read_bytes() == b"two"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(file, "three")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {file.name: b"two"}


@pytest.mark.parametrize("planted", [".report.html.unfinished", ".report.html.tmp", "report.html"])
def test_nothing_is_written_through_a_link(planted, victim, tmp_path):
    folder = tmp_path / "folder"
    (folder / planted).symlink_to(victim)
    files.write_atomically(folder / "report.html", "theirs")
    assert (folder / "report.html").read_text() == "theirs"
    assert not (folder / "report.html").is_symlink()
    assert victim.read_text() == "mine"


def test_a_name_that_was_guessed_is_not_opened(victim, tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / "folder" / ".jpipe-guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "folder" / "report.html", "theirs")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("target", ["profile.sh", "not there"])
def test_nothing_is_appended_through_a_link(target, victim, tmp_path):
    (tmp_path / "folder" / "metrics.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="it is a symbolic link, which jpipe does not follow there") as raised:
        files.open_to_append(tmp_path / "folder" / "metrics.jsonl")
    assert raised.value.filename == str(tmp_path / "folder" / "metrics.jsonl")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rr", "here/rr"),
        ("../rr", "rr"),
        ("rr/", "here/rr"),
        ("a b/ä/日本", "here/a b/ä/日本"),
        ("link/../rr", "elsewhere/rr"),  # as the system reads it: above what the link points to
        ("~/rr", "home/rr"),
        ("./../here//rr", "here/rr"),
    ],
)
def test_paths_are_resolved_as_the_system_does(text, expected, tmp_path, monkeypatch):
    for folder in ("here", "elsewhere/deep", "home"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert files.resolved(text, "run.dir") == tmp_path / expected
    assert files.shown(tmp_path / expected) == (
        expected.removeprefix("here/") if expected.startswith("here/") else str(tmp_path / expected)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\udcff/rr", r"run.dir: expected a path in UTF-8, found b'.*/\\xff/rr'; rename the folder, or choose another"),
        ("~nobody-has-this-name/rr", r"run.dir: '~nobody-has-this-name/rr' begins with an unknown user's home folder"),
        ("circle/rr", r"run.dir: cannot find 'circle/rr': "),
    ],
)
def test_paths_that_cannot_be_used_are_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    with pytest.raises(InputError, match=message):
        files.resolved(text, "run.dir")


def test_all_that_writes_goes_through_one_module():
    """Any other `open` for writing might follow a link."""
    root = Path(files.__file__).parents[1]
    ways = (
        r"\.write_(text|bytes)\(",
        r"open\([^)]*[\"'][wxa]b?[\"']",
        r"\.touch\((?!exist_ok=False)",
        r"NamedTemporaryFile",
        r"shutil\.(copy|move)",
    )
    sources = [path for package in PACKAGES.values() for path in package.rglob("*.py")]
    writers = {
        path.relative_to(root).as_posix()
        for path in sources
        if re.search("|".join(ways), path.read_text("utf-8").replace("open(os.devnull", ""))
    }
    assert writers <= {"jpipe/files.py"}


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    for reader in (False, True):
        number = os.open(tmp_path / ".lock", os.O_RDONLY | os.O_NONBLOCK) if reader else None
        with pytest.raises(OSError, match="it is not a regular file"):
            files.open_to_append(tmp_path / ".lock")
        if number is not None:
            os.close(number)


@pytest.mark.parametrize("text", ["\ud800/rr", "a\0b"])
def test_names_that_no_file_can_have_are_refused(text):
    with pytest.raises(InputError, match=r"^--out: '.*' has a character that no path can have; choose another name$"):
        files.expanded(text, "--out")
    with pytest.raises(InputError, match=r"^run.dir: '.*' has a character"):
        files.resolved(text, "run.dir")


URLS = [
    "s3://bucket/run",
    "gs://b",
    "hf://datasets/a/b",
    "file:///tmp/run",
    "S3A://b/*.csv",
    "dbfs:/mnt/run",
    "simplecache::s3://b",
    " s3://b",
]


@pytest.mark.parametrize("url", [*URLS, str(Path("s3://bucket/run"))])
def test_a_url_is_refused_and_nothing_is_made(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (files.expanded, files.resolved, files.unused, lambda path, _: checkpoints.steps(path)):
        with pytest.raises(InputError, match=rf"^(--out|folder): expected a path on this machine, found the URL '{re.escape(url)}'; copy "):
            use(url, "--out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "path", ["C:/data", "C:\\data", "./s3:/run", "a/b:/c", "a:b", "12:30:00", "runs/2024-01-01T10:00", "s3:", "~/s3:/b"]
)
def test_other_names_with_a_colon_are_paths(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded(path, "--out") == Path(path).expanduser()


def test_a_path_that_is_too_long_is_refused():
    for path in ("a" * 300, "a/" * 2500):
        for use in (files.expanded, files.resolved, files.unused):
            with pytest.raises(InputError, match=r"^--out: cannot find 'a.*': File name too long; choose another$"):
                use(path, "--out")


def test_a_home_folder_is_put_in_by_one_module():
    """It also refuses what is no path of this machine, such as a URL."""
    sources = [path for package in PACKAGES.values() for path in package.rglob("*.py") if ".expanduser(" in path.read_text("utf-8")]
    assert [path.name for path in sources] == ["files.py"]


def test_a_cycle_of_links_that_python_does_not_resolve_is_refused(tmp_path, monkeypatch):
    """`Path.resolve` does not raise an error from Python 3.13 on."""
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setattr(Path, "resolve", Path.absolute)
    with pytest.raises(InputError, match=r"^run.dir: cannot find '.*/circle/rr': Too many levels of symbolic links; choose another$"):
        files.resolved(str(tmp_path / "circle" / "rr"), "run.dir")
