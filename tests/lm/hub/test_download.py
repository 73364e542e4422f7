"""Names become paths: only the needed files are downloaded, once, whole and with the right hashes, or a line says what to change."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jpipe_lm.hub.download as downloads
from jpipe import InputError
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.hub import fetch_weights, pin
from jpipe_train.console.exit_codes import code_of
from jpipe_train.registry import located
from tests.lm.hub.conftest import forget
from tests.lm.hub.server import TOKEN, Hub

MODEL = {
    **{"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "README.md": b"about"},
    **{"model-00001-of-00002.safetensors": b"1" * 5000, "model-00002-of-00002.safetensors": b"2" * 5000},
    **{"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "onnx/model.safetensors": b"3"},
}
DATA = {
    **{"data/train-0.parquet": b"0" * 500, "data/train-1.parquet": b"1" * 500, "data/old/train-2.parquet": b"2" * 500},
    **{"more.jsonl": b"{}\n", "load.py": b"raise SystemExit"},
}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_its_config_and_tokenizer_until_its_weights_are_read(hub):
    sha = hub.add("models/me/model", MODEL)
    folder = located("hf:me/model", "here")
    assert folder.name == sha
    assert names(folder) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    fetch_weights(folder)
    assert names(folder) == {*names(folder), "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"2" * 5000
    assert not {"modeling.py", "pytorch_model.bin"} & names(folder)
    assert "onnx" not in os.listdir(folder)


def test_a_data_set_is_its_files_of_rows_or_those_at_a_path(hub):
    hub.add("datasets/me/data", DATA)
    first = located("hf:datasets/me/data/data/train-0.parquet", "here")
    assert first.read_bytes() == DATA["data/train-0.parquet"]
    assert hub.downloads() == ["train-0.parquet"]
    pattern = located("hf:datasets/me/data/data/*.parquet", "here")
    assert pattern.name == "*.parquet"
    assert sorted(hub.downloads()) == ["train-0.parquet", "train-1.parquet"]
    assert located("hf:datasets/me/data/**/train-2.parquet", "here").parent.name == "**"
    assert hub.downloads()[-1] == "train-2.parquet"
    assert names(located("hf:datasets/me/data", "here")) == {*DATA} - {"load.py"}
    assert located("hf:datasets/me/data/data", "here").is_dir()
    with pytest.raises(InputError, match=r"expected files in hf:datasets/me/data@\w+/none that jpipe reads, found none; check the path"):
        located("hf:datasets/me/data/none", "here")


def test_sources_of_data_are_named_after_their_data_sets():
    paths = [f"hf:datasets/me/texts@{'a' * 40}", f"hf:datasets/me/code@{'b' * 40}/data/*.parquet"]
    named = DataConfig.model_validate({"sources": [{"path": path} for path in paths]})
    assert [source.name for source in named.sources] == ["texts", "data"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:me/model", ("me/model", False, None, "")),
        ("hf://me/model@v1.0/sub/config.json", ("me/model", False, "v1.0", "sub/config.json")),
        ("hf:datasets/me/data@refs/convert/parquet/a/*.parquet", ("me/data", True, "refs/convert/parquet", "a/*.parquet")),
    ],
)
def test_names(text, expected):
    name = downloads.parse(text, "here")
    assert name == expected
    assert downloads.parse(str(name), "here") == name


@pytest.mark.parametrize(
    "text", ["hf:", "hf:model", "hf:me/model/../..", "hf:me/model//x", "hf:datasets/data", "hf:me/model@", "hf:me/a b"]
)
def test_other_names_are_errors(text):
    with pytest.raises(InputError, match=r"here: expected hf:OWNER/NAME or .*; correct the name, or write ./ before a path"):
        downloads.parse(text, "here")


def test_a_pinned_name_stays_and_a_run_that_resumes_keeps_its_commit(hub):
    first = hub.add("models/me/model", MODEL)
    pinned = pin("hf:me/model", "here")
    assert pinned == f"hf:me/model@{first}" == pin(pinned, "here")
    second = hub.add("models/me/model", MODEL | {"config.json": b"{}"})
    assert pin("hf:me/model", "here") == f"hf:me/model@{second}" == pin("hf:me/model@main", "here", pinned)
    assert pin("hf:me/model", "here", pinned) == pinned
    assert pin("hf:me/model", "here", f"hf:me/other@{first}") == f"hf:me/model@{second}"


PROGRAM = """
import pathlib, sys
from jpipe_lm.hub import fetch, fetch_weights
fetch_weights(pathlib.Path(fetch(sys.argv[1], "here")))
"""


def test_the_processes_of_a_machine_download_once(hub, tmp_path):
    hub.add("models/me/model", MODEL)
    command = [sys.executable, "-c", PROGRAM, pin("hf:me/model", "here")]

    def requests(number: int) -> list[str]:
        hub.requests.clear()
        environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / f"cache of {number}")}
        processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(number)]
        lines = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * number, lines
        return sorted(request for request in hub.requests if "/me/model/" in request)

    assert requests(3) == requests(1)  # two of three find all files in the cache, with hashes that the first has compared
    assert len(hub.downloads()) == 5


def test_a_file_with_another_hash_is_removed(hub):
    sha = hub.add("models/me/model", MODEL)
    hub.wrong = {"config.json"}
    with pytest.raises(
        InputError, match=r"here: expected 'config.json' of hf:me/model@\w+ with the sha1 \w{40}, found \w{40}; the file was rem"
    ):
        located("hf:me/model", "here")
    hub.wrong = {"model-00002-of-00002.safetensors"}
    folder = located("hf:me/model", "here")
    with pytest.raises(
        InputError, match=r"'model-00002-of-00002.safetensors' of .* with the sha256 \w{64}, found \w{64}; the file was removed"
    ):
        fetch_weights(folder)
    hub.wrong = set()
    fetch_weights(folder)
    assert folder.name == sha
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"2" * 5000


def test_a_download_that_breaks_off_continues(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.add("models/me/model", MODEL)
    folder, file = located("hf:me/model", "here"), "model-00001-of-00002.safetensors"
    hub.cut[file] = 100
    with pytest.raises(
        InputError, match=r"here: cannot download hf:me/model@\w+: RemoteProtocolError: .*; check the disk \(HF_HUB_CACHE\)"
    ):
        fetch_weights(folder)
    hub.cut[file] = 1
    fetch_weights(folder)
    assert (folder / file).read_bytes() == b"1" * 5000


def test_files_are_compared_with_their_hashes_even_after_a_download_that_failed(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.add("models/me/model", MODEL)
    folder = located("hf:me/model", "here")
    hub.cut["model-00002-of-00002.safetensors"] = 100
    hub.wrong = {"model-00001-of-00002.safetensors"}
    with pytest.raises(InputError, match="RemoteProtocolError"):
        fetch_weights(folder)
    hub.cut, hub.wrong = {}, set()
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() != b"1" * 5000
    with pytest.raises(InputError, match=r"expected 'model-00001-of-00002.safetensors' of .* the file was removed"):
        fetch_weights(folder)
    fetch_weights(folder)
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == b"1" * 5000


def test_no_file_leaves_the_cache(hub, tmp_path):
    for name in ("additional_chat_templates/../../../../../evil.jinja", "additional_chat_templates/..\\evil.jinja"):
        hub.add("models/me/model", {"config.json": b"{}", name: b"evil"})
        with pytest.raises(InputError, match=r"cannot download .*: ValueError: .*; use another repository"):
            located("hf:me/model", "here")
        forget()
    assert not [*tmp_path.rglob("*evil*")]
    hub.repos["models/me/model"].branches["main"] = "../../evil"
    hub.repos["models/me/model"].commits["../../evil"] = MODEL
    with pytest.raises(InputError, match=r"here: expected a commit of hf:me/model, found '../../evil'; check HF_ENDPOINT"):
        located("hf:me/model", "here")


def test_without_a_connection_the_cache_is_enough_if_it_is_whole(hub: Hub, monkeypatch):
    hub.add("models/me/model", MODEL)
    hub.add("datasets/me/data", DATA)
    folder = located("hf:me/model", "here")
    located("hf:datasets/me/data/data/train-0.parquet", "here")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget()
    assert located("hf:me/model", "here") == folder
    assert located("hf:datasets/me/data/data/train-0.parquet", "here").is_file()
    seen = len(hub.requests)
    for name, hint in (("me/model", "me/model"), ("me/other", "me/other"), ("datasets/me/data", "--repo-type dataset me/data")):
        hint = rf"; connect this machine, or fill its cache \(hf download {hint}\) and set HF_HUB_OFFLINE=1"
        with pytest.raises(
            InputError, match=rf"here: expected hf:{name}\S* in the cache, or a connection to the Hub, found neither: .*{hint}"
        ):
            fetch_weights(located(f"hf:{name}", "here"))
    assert len(hub.requests) == seen


def test_part_of_a_data_set_is_never_taken_for_all(hub: Hub, monkeypatch, tmp_path):
    hub.add("datasets/me/data", DATA)
    located("hf:datasets/me/data/data/train-0.parquet", "here")
    (listing,) = (tmp_path / "cache").rglob("trees/*.json")
    listing.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget()
    with pytest.raises(InputError, match=r"expected hf:datasets/me/data@\w+ in the cache, or a connection to the Hub, found neither"):
        located("hf:datasets/me/data", "here")


def test_an_unreachable_hub_is_a_line(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.close()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        InputError, match=r"expected hf:me/model in the cache, or a connection to the Hub, found neither: .*ConnectError"
    ) as caught:
        located("hf:me/model", "here")
    assert code_of(caught.value) == 1  # another try may succeed


def test_what_the_hub_refuses_is_a_line(hub, monkeypatch):
    hub.add("models/me/open", MODEL)
    hub.add("models/me/gated", MODEL, gated=True)
    hub.add("models/me/private", MODEL, private=True)
    for name, words in {
        "me/none": "expected the model hf:me/none, found none, or a private one; correct the name; for a private one, log in",
        "datasets/me/open": "expected the data set hf:datasets/me/open, found none",
        "me/private": "expected the model hf:me/private, found none, or a private one",
        "me/gated": "expected access to hf:me/gated, found a gated model; accept its terms on its page, then log in with hf auth login",
        "me/open@v9": "expected the revision of hf:me/open@v9, found none; give a branch, a tag or a commit",
    }.items():
        with pytest.raises(InputError, match=f"here: {words}"):
            located(f"hf:{name}", "here")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert located("hf:me/gated", "here").is_dir()
    assert located("hf:me/private", "here").is_dir()


def test_a_broken_server_a_full_disk_and_no_library_are_lines(hub, monkeypatch):
    hub.add("models/me/model", MODEL)
    name = pin("hf:me/model", "here")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", full)
        with pytest.raises(InputError, match=r"here: cannot download hf:me/model@\w+: No space left on device; check the disk") as caught:
            located(name, "here")
        assert code_of(caught.value) == 1
    with monkeypatch.context() as patch:
        patch.delattr("huggingface_hub.errors.IncompleteSnapshotError")
        with pytest.raises(InputError, match=r"huggingface_hub is not installed, or too old; pip install 'jpipe-train\[hub\]'"):
            located(name, "here")
    hub.down = 429
    with pytest.raises(InputError, match=r"here: cannot download hf:me/model: the server answers 429, .*; try again later") as caught:
        located("hf:me/model", "here")
    assert code_of(caught.value) == 1
