"""Checkpoints restore bit for bit, and any damage to their files is detected and named."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import jpipe
from jpipe.checkpoints import Checkpoint, at, newest, orbax_item, prune, steps, writing
from jpipe.checkpoints import records as checkpoint_records
from jpipe.checkpoints.folders import begin, unfinished_folder
from jpipe.checkpoints.records import Damaged, marker_text
from jpipe.checkpoints.writing import await_parts, complete, write_layers
from tests.train.items import STEP, layers_of

ROOT = Path(__file__).parents[3]
ODD = ["", ".", "..", "a.b", "a", "a/b", "/", "%", "%2E", "0", "ü 'x' \"y\"", "line\nbreak", "x" * 300, ".zarray", "None", "{}"]


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / str(step)


def save(folder: Path, step: int, processes: int = 2) -> None:
    """Write a small checkpoint of several processes."""
    for process in range(processes):
        write_layers(folder, step, layers_of(process), process)
    complete(folder, step, processes, facts={"step": step}, rows=b'{"step": 0}\n')


def newest_step(folder: Path, report: Callable[[Damaged], object]) -> int | None:
    found = newest(folder, report)
    return None if found is None else found.step


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a run folder with valid checkpoints of steps 10 and 20, for tests to copy."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20):
        save(folder, step)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def assert_same(actual: object, expected: object) -> None:
    """Check that trees have the same keys and arrays of the same type, shape and bits."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value)
    else:
        assert isinstance(actual, np.ndarray)
        expected = np.asarray(expected)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()


DTYPES = [
    "bool",
    "int4",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint32",
    "float16",
    "float32",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
]


def test_every_kind_of_array_comes_back_with_its_bits(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2, 12)
    kinds = {name: jnp.asarray(bits, name).reshape(3, 4) for name in DTYPES}
    special = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45])
    layers = {
        "all": kinds,
        "odd": {"0-d": jnp.bfloat16(3), "empty": jnp.zeros((0, 3)), "zeros": jnp.zeros((2,)), "special": special, "no leaves": {}},
        "nothing": {},
        "numpy": {"f64": np.arange(3.0), "transposed": np.arange(6.0).reshape(2, 3).T},
    }
    write_layers(tmp_path, 1, layers, 0)
    complete(tmp_path, 1, 1, facts=None)
    assert_same(Checkpoint(tmp_path, 1).read(), layers)


def test_names_of_any_characters_come_back(tmp_path):
    layers = {layer: {key: {"x": jnp.full((2,), i + 100.0 * j)} for i, key in enumerate(ODD)} for j, layer in enumerate(ODD)}
    write_layers(tmp_path, 1, layers, 0)
    complete(tmp_path, 1, 1, facts=None)
    assert_same(Checkpoint(tmp_path, 1).read(ODD), layers)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}
    assert_same(Checkpoint(tmp_path, 1).read(["..", "a.b"]), {"..": layers[".."], "a.b": layers["a.b"]})


def test_config_values_that_cannot_be_read_back_are_not_written(tmp_path):
    for tree in ({"a": [jnp.zeros(1)]}, {"a": None}, {"a": jnp.zeros(1, "uint4")}):
        with pytest.raises((TypeError, ValueError), match=r"nested dicts of arrays|uint4"):
            write_layers(tmp_path, 1, {"layer": tree}, 0)
        assert list(unfinished_folder(tmp_path, 1).iterdir()) == []


def test_plain_orbax_reads_an_item(run):
    assert_same(ocp.StandardCheckpointer().restore(place(run, 20) / "default"), layers_of(0) | layers_of(1))


def test_a_checkpoint_manager_lists_the_steps_and_restores_one(run):
    write_layers(run, 30, layers_of(0), 0)  # an unfinished one
    with ocp.CheckpointManager(run / "checkpoints") as manager:
        assert sorted(manager.all_steps()) == [10, 20]
        assert_same(manager.restore(manager.latest_step()), layers_of(0) | layers_of(1))
    with ocp.CheckpointManager(run / "checkpoints") as manager:
        assert_same(manager.restore(10, args=ocp.args.StandardRestore()), layers_of(0) | layers_of(1))
    assert newest_step(run, [].append) == 20


@pytest.mark.slow
@pytest.mark.oldest
def test_two_processes_write_different_trees_without_waiting_for_each_other(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.items", address]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "output").open("wb") as output:
        started = [
            subprocess.Popen([*command, str(index), str(tmp_path)], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            for index in range(2)
        ]
        try:
            codes = [process.wait(60) for process in started]
        finally:
            for process in started:
                process.send_signal(signal.SIGKILL)
                process.wait()
    assert codes == [0, 0], (tmp_path / "output").read_text()
    expected = layers_of(0) | layers_of(1)
    for index in range(2):
        restored = np.load(tmp_path / f"{index}.npz")
        assert {layer: restored[f"{layer} w"].tolist() for layer in expected} == {
            layer: tree["weights"]["w"].tolist() for layer, tree in expected.items()
        }
    assert_same(Checkpoint(tmp_path, STEP).read(), expected)


def test_the_same_layers_from_one_process_or_three(tmp_path):
    layers = layers_of(0) | layers_of(1) | layers_of(2)
    write_layers(tmp_path, 1, layers, 0)
    complete(tmp_path, 1, 1, facts=None)
    save(tmp_path, 2, processes=3)
    assert_same(Checkpoint(tmp_path, 1).read(), Checkpoint(tmp_path, 2).read())


def test_a_process_without_any_array_takes_part(tmp_path, capfd):
    write_layers(tmp_path, 1, layers_of(0), 0)
    write_layers(tmp_path, 1, {}, 1)
    write_layers(tmp_path, 1, {"tanh": {"weights": {}, "state": {"0": {}}}}, 2)
    complete(tmp_path, 1, 3, facts=None)
    assert_same(Checkpoint(tmp_path, 1).read(), layers_of(0) | {"tanh": {"weights": {}, "state": {"0": {}}}})
    assert capfd.readouterr() == ("", "")


def test_only_requested_arrays_are_read(run):
    shutil.rmtree(place(run, 20) / "default" / "ocdbt.process_0")
    assert list(Checkpoint(run, 20).read(["layer 1"])) == ["layer 1"]
    with pytest.raises(Damaged, match=r"process_0/.* is missing"):
        Checkpoint(run, 20).read(["layer 1", "layer 0"])


def test_facts_are_any_json(run):
    assert Checkpoint(run, 20).facts == {"step": 20}
    facts = {"losses": [0.1, 5e-324, float("inf")], "seed": 2**70, "plan": {"ü": [None, True, {}]}}
    write_layers(run, 30, layers_of(0), 0)
    complete(run, 30, 1, facts)
    assert Checkpoint(run, 30).facts == facts
    assert steps(run) == [10, 20, 30]


def test_the_rows_of_the_run_are_stored_with_it(run):
    assert Checkpoint(run, 20).rows() == b'{"step": 0}\n'
    change(place(run, 20) / "metrics.jsonl", "changed")
    with pytest.raises(Damaged, match=r"/20/metrics.jsonl: is not what was written"):
        Checkpoint(run, 20).rows()


def test_a_file_or_a_link_in_place_of_a_checkpoint_is_skipped(run, tmp_path, monkeypatch):
    place(run, 30).write_text("a file")
    place(run, 40).symlink_to(tmp_path)
    messages = []
    assert newest_step(run, lambda damaged, into=messages: into.append(str(damaged))) == 20
    assert [line.partition(":")[0] for line in messages] == [str(place(run, 40)), str(place(run, 30))]
    with pytest.raises(jpipe.InputError, match=r"/30: it is in the way .* cannot be removed: Not a directory; move it away$"):
        begin(run, 20)
    assert place(run, 30).read_text() == "a file", "which jpipe has not written"
    place(run, 30).unlink()
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    place(run, 50).mkdir()
    with pytest.raises(jpipe.InputError, match=r"/50: it is in the way .* cannot be removed: Operation not permitted; move it away$"):
        begin(run, 20)
    assert tmp_path.is_dir()
    assert not place(run, 40).is_symlink()


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "hf://user/model", Path("gs://bucket/run")], ids=str)
def test_checkpoints_behind_urls_are_refused(url):
    for use in (lambda: Checkpoint(url, 20), lambda: steps(url), lambda: newest(url, print), lambda: at(url, 20), lambda: prune(url, 1)):
        with pytest.raises(jpipe.InputError, match=r"^folder: expected a path on this machine, found the URL '.*'; copy what is there to"):
            use()


def test_records_are_read_once_and_hashes_compared_once(run, monkeypatch):
    checkpoint = Checkpoint(run, 20)
    checkpoint.verify()
    assert_same(checkpoint.read(), layers_of(0) | layers_of(1))
    shutil.rmtree(place(run, 20) / "default" / "ocdbt.process_0")
    monkeypatch.setattr(checkpoint_records, "read_bytes", lambda *_: pytest.fail("a record is read again"))
    monkeypatch.setattr(checkpoint_records, "describe", lambda *_: pytest.fail("a hash is compared again"))
    assert list(checkpoint.read(["layer 1"])) == ["layer 1"]
    with pytest.raises(Damaged, match=r"process_0/.* is missing"):
        checkpoint.read()


def test_a_missing_layer_is_named(run):
    with pytest.raises(jpipe.InputError, match=r"expected the layer 'head', found layer 0, layer 1; is it a checkpoint of this model\?$"):
        Checkpoint(run, 20).read(["layer 1", "head"])


def test_without_its_marker_a_checkpoint_is_unfinished(run):
    write_layers(run, 30, layers_of(0), 0)
    with pytest.raises(TimeoutError, match=r"30\.orbax-checkpoint-tmp: waited 0 s for process-1.json, process-2.json$"):
        await_parts(run, 30, range(3), limit=0.0)
    await_parts(run, 30, [0], limit=0.0)
    write_layers(run, 30, layers_of(1), 1)
    await_parts(run, 30, range(2), limit=0.0)
    assert steps(run) == [10, 20]
    messages = []
    assert newest_step(run, lambda damaged, into=messages: into.append(str(damaged))) == 20
    assert messages == [f"{unfinished_folder(run, 30)}: has no checkpoint.json, was not finished; restore another checkpoint"]
    assert steps(run / "none") == []
    assert newest_step(run / "none", messages.append) is None


def change(path: Path, kind: str) -> None:
    content = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
        case "cut off":
            path.write_bytes(content[: len(content) // 2])
        case "changed":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
        case "longer":
            path.write_bytes(content + b"x")


@pytest.mark.parametrize("kind", ["missing", "cut off", "changed", "longer"])
def test_damage_to_any_file_is_found_and_named(run, kind):
    newest = place(run, 20)
    names = [path.relative_to(newest) for path in files_of(newest)]
    assert len(names) >= 13
    for name in names:
        content = (newest / name).read_bytes()
        if kind in ("cut off", "changed") and not content:
            continue
        change(newest / name, kind)
        messages = []
        assert newest_step(run, lambda damaged, into=messages: into.append(str(damaged))) == 10
        (line,) = messages
        if name.name == "checkpoint.json" and kind == "missing":
            assert line.startswith(f"{newest}: has no checkpoint.json")
        else:
            expected = {"missing": "is missing", "cut off": "cut off"}.get(kind, "is not what was written")
            assert line.startswith(f"{newest / name}: ")
            assert expected in line
        (newest / name).write_bytes(content)
    assert newest_step(run, lambda damaged, into=messages: into.append(str(damaged))) == 20


def rewrite_marker(run: Path, **changes: object) -> None:
    """Change fields of a checkpoint's marker and update its hash, as another program may."""
    path = place(run, 20) / "checkpoint.json"
    data = json.loads(path.read_text()) | changes
    data.pop("sha256")
    plain = json.dumps(data, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(data | {"sha256": hashlib.sha256(plain.encode()).hexdigest()}))


def test_a_checkpoint_of_a_newer_jpipe_is_not_skipped(run):
    rewrite_marker(run, format="jpipe-checkpoint/3", surprise=1)
    for use in (
        lambda: newest_step(run, print),
        lambda: Checkpoint(run, 20).verify(),
        lambda: Checkpoint(run, 20).read(),
        lambda: Checkpoint(run, 20).facts,
    ):
        with pytest.raises(
            jpipe.InputError, match=r"json: expected the format jpipe-checkpoint/2, found jpipe-checkpoint/3; .*: update jpipe$"
        ):
            use()


def test_a_checkpoint_of_format_1_is_refused_by_its_name(run):
    rewrite_marker(run, format="jpipe-checkpoint/1")
    message = r"expected the format jpipe-checkpoint/2, found jpipe-checkpoint/1; version 0\.4 reads it, and saves it in the new format$"
    with pytest.raises(jpipe.InputError, match=rf"20/checkpoint\.json: {message}"):
        newest_step(run, print)
    for step in (10, 20):  # the names that they had
        place(run, step).rename(run / "checkpoints" / f"{step:08d}")
    for use in (lambda: steps(run), lambda: newest_step(run, print), lambda: begin(run, None)):
        with pytest.raises(jpipe.InputError, match=rf"00000020: {message}"):
            use()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "else"},
        {"format": 3},
        {"processes": 10**12},
        {"processes": "2"},
        {"items": {"../process-0.json": "0"}},
        {"items": []},
        {"step": 30},
        {"more": 1},
    ],
    ids=str,
)
def test_a_marker_that_jpipe_would_not_write_is_refused(run, changes):
    rewrite_marker(run, **changes)
    with pytest.raises(Damaged, match=r"checkpoint\.json: "):
        Checkpoint(run, 20).verify()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"sha256": 1}', b"9" * 5000])
def test_a_marker_of_any_bytes_is_refused(run, content):
    (place(run, 20) / "checkpoint.json").write_bytes(content)
    with pytest.raises(Damaged, match="is not what was written"):
        Checkpoint(run, 20).verify()


def forge(run: Path, files: dict) -> None:
    """Rewrite a checkpoint to list these files, with hashes that match."""
    item = place(run, 20) / "process-0.json"
    item.write_text(json.dumps({"layers": ["layer 0"], "files": files}))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (item, place(run, 20) / "metrics.jsonl")]
    marker = marker_text(20, {item.name: digests[0]}, digests[1], 0, {})
    (place(run, 20) / "checkpoint.json").write_text(marker)


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname", "a/../../../../secret"])
def test_names_do_not_lead_out_of_the_folder(run, name):
    (run / "secret").write_text("secret")
    forge(run, {name: {"size": 6, "sha256": "0"}})
    with pytest.raises(Damaged, match=rf"/20: names a file outside its folder, '{name}'; restore another checkpoint$"):
        Checkpoint(run, 20).read()


def test_a_foreign_item_with_valid_hashes_is_refused_by_name(run):
    for path in files_of(place(run, 20) / "default"):
        path.write_bytes(b"nonsense")
    forge(run, {})
    Checkpoint(run, 20).verify()
    with pytest.raises(Damaged, match=r"default: is no Orbax item as jpipe writes it"):
        Checkpoint(run, 20).read()
    with pytest.raises(Damaged, match=r"default: is no Orbax item as jpipe writes it"):
        Checkpoint(run, 20).specs()
    shutil.rmtree(place(run, 20) / "default")
    with ocp.StandardCheckpointer() as plain:
        plain.save(place(run, 20) / "default", {"layer 0": np.ones(2)})  # an array where the parts of a layer belong
    forge(run, {})
    with pytest.raises(Damaged, match=r"default: is no Orbax item as jpipe writes it \(TypeError: "):
        Checkpoint(run, 20).read()


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, Damaged), (errno.EACCES, jpipe.InputError), (errno.ESTALE, jpipe.InputError)])
def test_an_unreadable_checkpoint_is_not_reported_as_damaged(run, monkeypatch, number, kind):
    def unreadable(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(checkpoint_records, "describe", unreadable)
    with pytest.raises(jpipe.InputError, match=rf"checkpoints/20/.*: cannot be read.*{os.strerror(number)}") as caught:
        Checkpoint(run, 20).verify()
    assert type(caught.value) is kind


def test_an_item_is_synced_to_disk_before_it_is_marked_complete(tmp_path, monkeypatch):
    on_disk, sync, replace = set(), os.fsync, os.replace

    def noted(number):
        on_disk.add(os.fstat(number).st_ino)
        sync(number)

    def named(unfinished, name):
        marks = {"process-0": Path(name).with_suffix(""), "checkpoint": Path(name).parent}  # by the name of the file that says so
        item = marks.get(Path(name).stem)
        if item is not None and item.is_dir():
            paths = {*item.rglob("*"), item, item.parents[1], item.parents[2]} - {Path(unfinished)}
            lacking.append([path for path in paths if path.stat().st_ino not in on_disk])
        replace(unfinished, name)

    lacking: list = []
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", named)
    write_layers(tmp_path, 10, layers_of(0), 0)
    complete(tmp_path, 10, 1, facts=None)
    assert lacking == [[], []]


def test_a_full_disk_leaves_no_checkpoint_that_looks_complete(run):
    """A limit on the file size fails in the same calls as a full disk."""
    write_layers(run, 30, layers_of(0), 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_layers(run, 30, {"big": {"w": jnp.ones((200, 200))}}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == 27
    assert {path.name for path in unfinished_folder(run, 30).iterdir()} == {"process-0", "process-0.json"}
    assert newest_step(run, [].append) == 20
    write_layers(run, 30, layers_of(1), 1)  # there is room again
    complete(run, 30, 2, facts=None)
    assert newest_step(run, print) == 30


WRITTEN = {  # what vanishes, once it is written and before the next is
    "the arrays": ("process-1/ocdbt.process_1/d", orbax_item, "_compare"),
    "the part": ("process-1", orbax_item, "_compare"),
    "the checkpoint": ("nothing else", orbax_item, "_compare"),
    "a file that is listed": ("process-1/ocdbt.process_1/d", writing, "describe"),
    "the parts": ("process-0", writing, "write_atomically"),
    "the record": ("process-1.json", writing, "verify_files"),
    "a part, before it is joined": ("process-0/ocdbt.process_0", writing, "join_parts"),
    "a part, before it is moved": ("process-0/ocdbt.process_0", orbax_item._MoveStores, "serialize"),
    "a part, once it is moved": ("complete/default.orbax-checkpoint-tmp*/ocdbt.process_1/d", orbax_item._MoveStores, "serialize"),
    "the item": ("complete/default", writing, "step_metadata"),
    "the joined item": ("complete", writing, "publish"),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_a_checkpoint_whose_files_vanish_while_it_is_written_is_not_complete(what, tmp_path, monkeypatch, capfd):
    pattern, owner, name = WRITTEN[what]
    write_layers(tmp_path, 30, layers_of(0), 0)
    real = getattr(owner, name)

    unfinished = unfinished_folder(tmp_path, 30)

    def harm():
        for path in list(unfinished.glob(pattern)) or [unfinished]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def harmed(*arguments, **options):
        if name != "serialize":
            harm()
            return real(*arguments, **options)

        async def then():
            if "before" in what:
                harm()
            result = await real(*arguments, **options)
            harm()
            return result

        return then()

    def write():
        write_layers(tmp_path, 30, {"x": {"params": {"0": {"w": np.ones((40, 40))}}}}, 1)
        complete(tmp_path, 30, 2, facts=None)

    monkeypatch.setattr(owner, name, harmed)
    with pytest.raises(OSError, match=r"."):  # it names the file, or what Orbax has said
        write()
    monkeypatch.undo()
    assert steps(tmp_path) == []
    assert capfd.readouterr().err == "", "no traceback of Orbax's"


def test_orbax_logs_no_tracebacks_where_the_disk_is_full(tmp_path, monkeypatch, capfd, caplog):
    """Orbax's thread logs the exception that `save` raises as well."""

    def full(self, text, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(epath.Path("/")), "write_text", full)
    write_layers(tmp_path, 30, layers_of(0), 0)
    with pytest.raises(OSError, match="No space left on device"):
        complete(tmp_path, 30, 1, facts=None)
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "run").write_text("a file")
    message = r"run/checkpoints: checkpoints cannot be written there: .*; choose another run\.dir$"
    with pytest.raises(jpipe.InputError, match=message):
        begin(tmp_path / "run", None)
    with pytest.raises(NotADirectoryError):  # the run is going on by then, and does as with a full disk
        write_layers(tmp_path / "run", 1, layers_of(0), 0)


def test_a_resumed_run_removes_the_rows_that_it_will_write_again(run):
    write_layers(run, 30, layers_of(1), 1)
    begin(run, 20)
    assert sorted(os.listdir(run / "checkpoints")) == ["10", "20"]
    assert begin(run, 10) == ["20.old"], "a later one that was complete is kept under another name"
    assert newest_step(run, print) == 10
    with pytest.raises(
        jpipe.InputError, match=r"expected no checkpoint where a run begins, found one of step 10; resume, or choose another run\.dir$"
    ):
        begin(run, None)
    assert steps(run) == [10]
    (place(run, 10) / "checkpoint.json").unlink()
    begin(run, None)
    assert os.listdir(run / "checkpoints") == ["20.old"]


def test_an_item_replaces_the_remains_of_a_killed_process(run):
    write_layers(run, 20, layers_of(7), 1)
    (unfinished_folder(run, 20) / "process-1.json").unlink()
    for process in range(2):
        write_layers(run, 20, layers_of(process + 5), process)
    Checkpoint(run, 20).verify()
    assert_same(Checkpoint(run, 20).read(), layers_of(0) | layers_of(1))
    complete(run, 20, 2, facts=None)
    assert_same(Checkpoint(run, 20).read(), layers_of(5) | layers_of(6))
    assert sorted(os.listdir(run / "checkpoints")) == ["10", "20"]
    assert {path.name for path in place(run, 20).iterdir()} == {
        "_CHECKPOINT_METADATA",
        "checkpoint.json",
        "default",
        "metrics.jsonl",
        "process-0.json",
        "process-1.json",
    }


HOUR = 3600


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"keep": 1}, [60]),
        ({"keep": 3}, [40, 50, 60]),
        ({"keep": 100}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 2, "keep_every": 7}, [50, 60]),
        ({"keep": 1, "keep_hours": 2.0}, [10, 30, 50, 60]),
        ({"keep": 1, "keep_hours": 0.5, "keep_every": 10}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1, "keep_hours": 100.0, "keep_every": 30}, [10, 30, 60]),
    ],
    ids=str,
)
def test_pruning_keeps_the_configured_checkpoints(tmp_path, arguments, expected):
    for step in range(10, 70, 10):  # one an hour
        write_layers(tmp_path, step, {}, 0)
        complete(tmp_path, step, 1, facts=None)
        os.utime(place(tmp_path, step) / "checkpoint.json", (0, HOUR * step / 10))
    for unfinished in (35, 70):
        unfinished_folder(tmp_path, unfinished).mkdir()
    (tmp_path / "checkpoints" / "notes").touch()
    for _ in range(2):  # the second time nothing changes
        prune(tmp_path, **arguments)
        assert steps(tmp_path) == expected
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*map(str, expected), "70.orbax-checkpoint-tmp", "notes"}


def test_nothing_is_removed_while_the_newest_is_not_all_there(run):
    shutil.rmtree(place(run, 20) / "default" / "ocdbt.process_1")
    prune(run, keep=1)
    assert steps(run) == [10, 20]


def test_a_damaged_checkpoint_is_neither_counted_nor_removed(run):
    for step in (30, 40):
        save(run, step)
    (place(run, 30) / "process-1.json").unlink()
    prune(run, keep=2)
    assert steps(run) == [20, 30, 40]
    save(run, 50)
    prune(run, keep=2)
    assert steps(run) == [30, 40, 50]


def test_an_unreadable_checkpoint_with_valid_hashes_is_skipped(run):
    index = next((place(run, 20) / "default" / "d").iterdir())
    index.unlink()
    marker = json.loads((place(run, 20) / "checkpoint.json").read_text())
    del marker["index"][f"default/d/{index.name}"]
    rewrite_marker(run, index=marker["index"])
    Checkpoint(run, 20).verify()
    messages: list[str] = []
    assert newest_step(run, lambda damaged, into=messages: into.append(str(damaged))) == 10
    assert [line.partition(": ")[0] for line in messages] == [str(place(run, 20) / "default")]


def test_a_kill_during_removal_leaves_an_unfinished_checkpoint_not_a_damaged_one(run, monkeypatch):
    def killed(path):
        files_of(path)[-1].unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(run, keep=1)
    assert steps(run) == [20]
    monkeypatch.undo()
    prune(run, keep=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["20"]
