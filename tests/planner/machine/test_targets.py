"""Targets: the table has what XLA and a plan need; a user's own file is read; mistakes and missing compilers are one line each."""

import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import yaml

import jpipe
from jpipe_planner import Device, Topology
from jpipe_planner.machine import attached, targets
from jpipe_planner.machine.attached import attached_target
from jpipe_planner.machine.compiling import compiling_for
from jpipe_planner.machine.targets import Target, TargetUnavailable, find_target, known_targets
from jpipe_planner.machine.targets import target_devices as devices_of

GPU = {
    "platform": "cuda",
    "name": "My GPU",
    "memory": "80 GB",
    "reserved": {"CUDA": "1 GB"},
    "flops": {"bfloat16": "989 TFLOP/s"},
    "memory_bandwidth": "3350 GB/s",
    "compiler": {
        "compute_capability": "9.0",
        "core_count": 132,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 85 * 10**9,
    },
}
TPU = {**GPU, "platform": "tpu", "compiler": {"topology": "v5e:2x4"}}


def text_of(fields, **changed) -> str:
    """Return a file with one target; a change of None removes a field, and names with a dot change the compiler's properties."""
    compiler = {name.partition("__")[2]: value for name, value in changed.items() if name.startswith("compiler__")}
    merged = {**fields, "compiler": {**fields["compiler"], **compiler}}
    merged |= {name: value for name, value in changed.items() if not name.startswith("compiler__")}
    for data in (merged, merged["compiler"] if isinstance(merged["compiler"], dict) else {}):
        for name in [name for name, value in data.items() if value is None]:
            del data[name]
    return yaml.safe_dump({"format": "jpipe-targets/1", "targets": {"mine": merged}})


@pytest.mark.parametrize("name", known_targets())
def test_every_target_of_the_table_has_its_figures_and_sources(name):
    target = find_target(name)
    assert 0 < target.limit < target.memory
    assert 0.9 * target.memory < target.limit
    assert set(target.flops) >= {"float32"}
    assert all(source.startswith("https://") for source in target.sources)
    assert target.sources
    if target.platform == "cuda":
        text = target.config_text()
        major, minor = target.capability
        assert re.search(rf"cuda_compute_capability {{ major: {major} minor: {minor}( feature_extension: \w+)? }}", text)
        assert all(f" {field}: " in text for field in (*targets.CAPABILITIES["9.0"], "core_count", "memory_bandwidth"))


def test_a_topology_has_the_figures_of_its_target_and_its_own_replace_them():
    target = find_target("h100-80gb")
    device = Device(target="h100-80gb", memory="64 GB", reserved="0 B")
    assert (device.name, device.flops, device.efficiency) == (target.name, target.flops, target.efficiency)
    assert device.limit == 64e9
    assert Device(target="h100-80gb").limit == target.limit
    assert device.compiles_for == target


def test_a_file_of_the_user_is_found_from_where_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(text_of(GPU))
    (tmp_path / "sub" / "topology.yaml").write_text(
        "{format: jpipe-topology/1, levels: [{count: 2, bandwidth: 1 GB/s}], device: {target: mine.yaml}}"
    )
    monkeypatch.chdir(tmp_path)
    assert find_target("sub/mine.yaml") == Target(**GPU)
    topology = Topology.from_yaml((tmp_path / "sub" / "topology.yaml").read_text(), "t.yaml", tmp_path / "sub")
    assert topology.device.compiles_for == Target(**GPU)
    assert topology.device.limit == 79e9


@pytest.mark.parametrize(
    ("fields", "changed", "message"),
    [
        (GPU, {"platform": "gpu"}, "platform: expected 'cuda' or 'tpu', found 'gpu'"),
        (GPU, {"memory": None}, "key 'memory' is missing; add it"),
        (GPU, {"platfrom": "cuda"}, "unknown key 'platfrom'; did you mean 'platform'?"),
        (GPU, {"memory": "80"}, "memory: expected bytes, such as 16 GB or 16 GiB, found '80'"),
        (GPU, {"reserved": {"CUDA": "90 GB"}}, "reserved: expected less than the memory of 80,000,000,000 bytes, found 90,000,000,000"),
        (GPU, {"flops": {}}, "flops: expected peak rates without sparsity by dtype, such as {bfloat16: 989 TFLOP/s}, found none; add them"),
        (GPU, {"flops": {"fp16": 1e12}}, "flops: unknown dtype 'fp16'; did you mean 'float16'?"),
        (GPU, {"name": 'a"\nb'}, "name: expected at most 80 letters, digits, spaces and . : ( ) / + -, found 'a\"\\nb'"),
        (GPU, {"name": "a\n"}, "name: expected at most 80 letters, digits, spaces and . : ( ) / + -, found 'a\\n'"),
        (GPU, {"name": 'x" } platform_name: "'}, "name: expected at most 80 letters, digits, spaces and . : ( ) / + -, found 'x\" }"),
        (GPU, {"name": "a" * 81}, "name: expected at most 80 letters"),
        (GPU, {"name": 3}, "name: expected at most 80 letters, digits, spaces and . : ( ) / + -, found 3"),
        (GPU, {"compiler": {}}, "compiler: key 'compute_capability' is missing; add it, such as '9.0'"),
        (GPU, {"compiler": "9.0"}, "compiler: expected a valid dictionary, found '9.0'"),
        (GPU, {"compiler__compute_capability": "9"}, "compiler: compute_capability: expected text such as '9.0', found '9'"),
        (GPU, {"compiler__compute_capability": [9, 0]}, "compiler: compute_capability: expected text such as '9.0', found [9, 0]"),
        (GPU, {"compiler__compute_capability": "3.5"}, "compiler: the table has no compute capability 3.5, only 5.2, 6.1, 7.0, "),
        (
            GPU,
            {"compiler__core_count": None},
            "compiler: expected core_count, l2_cache_size, clock_rate_ghz, device_memory_size, found no core_",
        ),
        (GPU, {"compiler__core_count": "many"}, "compiler: core_count: expected an integer above 0, found 'many'"),
        (GPU, {"compiler__core_count": 1.5}, "compiler: core_count: expected an integer above 0, found 1.5"),
        (GPU, {"compiler__core_count": True}, "compiler: core_count: expected an integer above 0, found True"),
        (GPU, {"compiler__core_count": [1]}, "compiler: core_count: expected an integer above 0, found [1]"),
        (GPU, {"compiler__clock_rate_ghz": float("nan")}, "compiler: clock_rate_ghz: expected a number above 0, found nan"),
        (GPU, {"compiler__l2_cache_size": -1}, "compiler: l2_cache_size: expected an integer above 0, found -1"),
        (GPU, {"compiler__l2_cach": 1}, "compiler: unknown property 'l2_cach'; did you mean 'l2_cache_size'?"),
        (TPU, {"compiler__topology": None}, "compiler: key 'topology' is missing; add it, such as v5e:2x4"),
        (TPU, {"compiler__topology": "v5e"}, "compiler: topology: expected text such as 'v5e:2x4', found 'v5e'"),
        (TPU, {"compiler__topology": 4}, "compiler: topology: expected text such as 'v5e:2x4', found 4"),
        (TPU, {"compiler__core_count": 1}, "compiler: unknown property 'core_count'; "),
    ],
)
def test_a_mistake_in_a_target_is_one_line(fields, changed, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text_of(fields, **changed))
    with pytest.raises(jpipe.InputError) as error:
        find_target(str(path))
    assert str(error.value).startswith(f"{path}: targets.mine: {message}")
    assert len(error.value.args) == 1


def test_a_target_from_python_is_validated_in_the_same_words():
    with pytest.raises(jpipe.InputError, match=r"^target: flops: expected peak rates"):
        Target(**{**GPU, "flops": {}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "format: jpipe-topology/1",
            ": expected YAML with 'format: jpipe-targets/1', found 'jpipe-topology/1'; is this a file of targets?",
        ),
        ("- a", ": expected YAML with 'format: jpipe-targets/1', found 'list'; is this a file of targets?"),
        ("", ": expected YAML with 'format: jpipe-targets/1', found 'NoneType'; is this a file of targets?"),
        ("a: [1,\nb: {", ", line 2, column 5: this YAML cannot be read: "),
        ("{format: jpipe-targets/1}", ": key 'targets' is missing; add it"),
        ("{format: jpipe-targets/1, targets: {}}", ": targets: expected at least 1 of them, found 0"),
        ("{format: jpipe-targets/1, targets: {a: 3}}", ": targets.a: expected a valid dictionary, found 3"),
        ("{format: jpipe-targets/1, targets: {a: {}}, more: 1}", ": unknown key 'more'; "),
        ("a: " + "x" * 2**20, "larger than 1 MiB, the limit for such a file; name a file that is there"),
    ],
)
def test_a_file_that_holds_no_target_is_refused(text, message, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(jpipe.InputError) as error:
        find_target(str(path))
    assert message in error.value.args[0]
    assert str(path) in error.value.args[0]


def test_a_file_with_several_targets_is_refused(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(text_of(GPU) + text_of(TPU).partition("targets:\n")[2].replace("mine", "other"))
    with pytest.raises(jpipe.InputError, match=r"t\.yaml: expected one target, found mine, other; put each target into a separate file$"):
        find_target(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "target: unknown target 'h100'; did you mean 'h100-80gb' or 'h100-pcie'? (the name of your own file must end in .yaml)"),
        ("rtx-4080", "target: unknown target 'rtx-4080'; did you mean 'rtx-4090'? (the name of your own file must end in .yaml)"),
        ("", "target: unknown target ''; known: a100-40gb, "),
        ("none.yaml", "target: cannot read 'none.yaml': No such file or directory; name a file that is there"),
    ],
)
def test_an_unknown_target_is_named_with_the_nearest_one(name, message):
    with pytest.raises(jpipe.InputError) as error:
        find_target(name)
    assert str(error.value).startswith(message)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Set what is installed: the modules, the versions of packages, and the assembler with its release of CUDA."""

    def installed(modules=(), versions=None, ptxas=13):
        names = {"jaxlib": "0.12.0", **(versions or {})}
        monkeypatch.setattr(targets, "_folders", lambda module: [tmp_path] if module in modules else [])
        monkeypatch.setattr(importlib.metadata, "version", lambda name: names[name])
        monkeypatch.setattr(targets, "_ptxas", lambda: None if ptxas is None else "/bin/ptxas")
        monkeypatch.setattr(targets, "_release", lambda path: ptxas)

    return installed


CUDA = ("jax_plugins.xla_cuda13",)


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("h100-80gb", {}, "XLA's compiler for cuda is not installed; install jpipe-train[target-cuda]"),
        ("v5e", {"modules": CUDA}, "XLA's compiler for tpu is not installed; install jpipe-train[target-tpu]"),
        (
            "h100-80gb",
            {"modules": CUDA, "versions": {"jax-cuda13-plugin": "0.11.0"}},
            "jax-cuda13-plugin 0.11.0 is for another JAX than 0.12.0; install jax-cuda13-plugin==0.12.0",
        ),
        (
            "h100-80gb",
            {"modules": CUDA, "versions": {"jax-cuda13-plugin": "0.12.0"}, "ptxas": None},
            "there is no ptxas, NVIDIA's assembler; install jpipe-train[target-cuda]",
        ),
        (
            "titan-x",
            {"modules": CUDA, "versions": {"jax-cuda13-plugin": "0.12.0"}},
            "NVIDIA TITAN X (Pascal) has compute capability 6.1, but the ptxas of CUDA 13 supports 7.5 and newer; install "
            "nvidia-cuda-nvcc-cu12, which has the ptxas of CUDA 12, and set CUDA_ROOT to its folder nvidia/cuda_nvcc",
        ),
    ],
)
def test_a_missing_compiler_is_named_with_what_to_install(name, state, message, installed):
    installed(**state)
    target = find_target(name)
    assert targets.target_refusal(target) == message
    with pytest.raises(TargetUnavailable) as error:
        devices_of(target)
    assert str(error.value) == f"target: {message}"
    compiling = compiling_for(Device(target=name))
    assert (compiling.missing, compiling.kind) == (message, "cpu")
    assert set(compiling.devices) <= set(jax.local_devices())


def test_installed_compilers_are_not_refused(installed):
    installed((*CUDA, "libtpu"), {"jax-cuda13-plugin": "0.12.0"}, ptxas=12)
    assert [targets.target_refusal(target) for target in known_targets().values()] == [None] * len(known_targets())
    installed(("jax_plugins.xla_cuda12",), {"jax-cuda12-plugin": "0.12.0"})
    assert targets.target_refusal(find_target("h100-80gb")) is None


def test_the_assembler_is_the_one_that_xla_takes(tmp_path, monkeypatch):
    def put(*folders) -> str:
        (file := tmp_path.joinpath(*folders, "bin", "ptxas")).parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
        file.chmod(0o700)
        return str(file)

    root, package, on_path = put("root"), put("site", "nvidia", "cu13"), put("path")
    monkeypatch.setattr(targets, "_folders", lambda module: [tmp_path / "site" / module.replace(".", "/")])
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path / "root"))
    assert targets._ptxas() == root
    monkeypatch.delenv("CUDA_ROOT")
    assert targets._ptxas() == package
    Path(package).unlink()
    assert targets._ptxas() == on_path
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert targets._release(on_path) == 12
    assert targets._release(str(tmp_path / "none")) == 0


def test_a_target_for_which_xla_cannot_compile_is_one_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("INTERNAL: libdevice not found\nSearched in:\n  /usr")

    monkeypatch.setattr(targets, "target_refusal", lambda target: None)
    monkeypatch.setattr(targets, "_devices_elsewhere", fail)
    with pytest.raises(TargetUnavailable) as error:
        devices_of(Target(**GPU))
    assert re.fullmatch(
        r"target: XLA cannot compile for My GPU here: RuntimeError: INTERNAL: libdevice not found; it needs ptxas, nvlink and "
        r"libdevice, which jpipe-train\[target-cuda\] installs",
        str(error.value),
    )


def test_more_devices_than_a_slice_has_are_refused(monkeypatch):
    monkeypatch.setattr(targets, "target_refusal", lambda target: None)
    monkeypatch.setattr(targets, "_devices_elsewhere", lambda *_: tuple(jax.local_devices()))
    assert len(devices_of(Target(**TPU), 2)) == 2
    with pytest.raises(TargetUnavailable, match=r"expected 9 devices of My GPU, found 8 in a slice; use fewer"):
        devices_of(Target(**TPU), 9)


def test_devices_of_this_machine_are_used_if_they_are_of_the_kind():
    target = Target(**{**GPU, "name": jax.local_devices()[0].device_kind})
    assert devices_of(target, 2) == tuple(jax.local_devices()[:2])


# What cuDeviceGetAttribute answers on an H100, by CUdevice_attribute of the driver API.
H100 = {1: 1024, 5: 2**31 - 1, 6: 65535, 7: 65535, 8: 49152, 10: 32, 12: 65536, 13: 1980000, 16: 132, 36: 2619000, 37: 5120}
H100 |= {38: 52428800, 39: 2048, 75: 9, 76: 0, 81: 233472, 82: 65536, 97: 232448}


class Driver:
    """A CUDA driver with the attributes of one GPU; each function returns 0 for success."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        return 0 if number == 0 else 101

    def cuDeviceGetAttribute(self, value, code, device):
        value._obj.value = H100[code]
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 84942979072
        return 0


@pytest.fixture
def attach(monkeypatch):
    """Attach a device to this machine."""

    def attach(kind, platform="gpu", version="cuda 13000", number=0):
        device = SimpleNamespace(
            device_kind=kind, platform=platform, client=SimpleNamespace(platform_version=version), local_hardware_id=number
        )
        monkeypatch.setattr(attached, "local_devices", lambda: [device])
        monkeypatch.setattr(attached.ctypes, "CDLL", lambda name: Driver())

    return attach


def test_an_attached_gpu_of_the_table_has_its_rates_and_the_drivers_properties(attach, tmp_path):
    attach("NVIDIA H100 80GB HBM3")
    found = attached_target()
    assert (found.name, found.table, found.differing) == ("h100-80gb", "h100-80gb", ())
    (tmp_path / "here.yaml").write_text(found.text)
    target, published = find_target(str(tmp_path / "here.yaml")), find_target("h100-80gb")
    assert target.config_text() == published.config_text()
    assert target.compiler.keys() > published.compiler.keys()  # all that the driver tells
    for name in ("memory", "limit", "memory_bandwidth", "flops", "efficiency"):
        assert getattr(target, name) == pytest.approx(getattr(published, name))


def test_properties_that_differ_from_the_table_are_told(attach, monkeypatch):
    attach("NVIDIA H100 80GB HBM3")
    monkeypatch.setitem(H100, 16, 114)
    assert attached_target().differing == ("core_count 114 (table: 132)",)


def test_an_unknown_gpu_needs_its_rates_from_the_user(attach, tmp_path):
    attach("NVIDIA B1000 (rev 2)")
    found = attached_target()
    assert (found.name, found.table) == ("nvidia-b1000-rev-2", "")
    path = tmp_path / "here.yaml"
    path.write_text(found.text)
    with pytest.raises(jpipe.InputError, match=r"targets\.nvidia-b1000-rev-2: flops: expected peak rates"):
        find_target(str(path))
    path.write_text(found.text.replace("flops: {}\n", "flops: {bfloat16: 2000 TFLOP/s}\n"))
    assert find_target(str(path)).flops == {"bfloat16": 2e15}
    assert find_target(str(path)).memory == 84942979072


def test_an_attached_tpu_is_that_of_the_table(attach, tmp_path):
    attach("TPU v5 lite", "tpu", "TPU")
    (tmp_path / "here.yaml").write_text(attached_target().text)
    assert find_target(str(tmp_path / "here.yaml")).compiler == find_target("v5e").compiler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", "cpu", ""), "expected an NVIDIA GPU or a TPU, found cpu; run it where JAX has one, with jpipe-train[cuda13] or "),
        (("AMD MI300X", "gpu", "rocm 60300"), "expected an NVIDIA GPU or a TPU, found AMD MI300X; run it where JAX has one"),
        (("TPU v9", "tpu", ""), "expected a TPU of a kind in the table, TPU v4, TPU v5 lite, TPU v5, TPU v6 lite, found TPU v9; write"),
        (("NVIDIA L4", "gpu", "cuda", 1), "the CUDA driver answers cuDeviceGet with error 101; see CUresult in its documentation"),
    ],
)
def test_other_machines_are_told_what_was_expected(arguments, message, attach):
    attach(*arguments)
    with pytest.raises(jpipe.InputError) as error:
        attached_target()
    assert str(error.value).startswith(f"target --here: {message}")


@pytest.mark.parametrize(
    ("name", "count", "slice_"),
    [
        ("v5e", 1, "v5e:2x4"),
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 9, "v5e:4x4"),
        ("v5e", 32, "v5e:4x8"),
        ("v5p", 8, "v5p:2x2x2"),
        ("v5p", 16, "v5p:2x2x4"),
    ],
)
def test_a_slice_has_at_least_as_many_chips_as_are_asked_for(name, count, slice_):
    assert find_target(name).tpu_topology(count)["topology_name"] == slice_
