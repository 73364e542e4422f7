"""Hugging Face folders that are damaged, incomplete, unsupported or hostile are refused in one line, without running their code."""

import json
import os
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpipe import InputError
from jpipe_lm.checkpoint import huggingface
from jpipe_lm.checkpoint.huggingface.folder import INDEX, WHOLE
from jpipe_train.checkpoint import warm_start
from jpipe_train.checkpoint.sources import safetensors_file
from jpipe_train.config.config import Config
from tests.lm.checkpoint import folders
from tests.lm.checkpoint.folders import GOLDEN

SHARD = "model-00002-of-00002.safetensors"


def refused(folder: Path, message: str) -> None:
    """Check that a folder is refused with exactly this message in one line."""
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        warm_start._source(folder, Config(), None, print)
    assert "\n" not in str(caught.value)


def arrays(folder: Path, *, strict: bool = True) -> dict[str, np.ndarray]:
    """Return all arrays of a folder by jpipe's names."""
    source = huggingface.source(folder, strict=strict)
    return {name: array for part in source.read({"": list(source.specs)}) for name, array in part.items()}


def test_a_folder_without_config_or_without_weights_is_refused(tmp_path):
    whole = folders.copied("gpt2", tmp_path / "whole")
    (whole / "config.json").unlink()
    refused(
        whole, f"{whole}/config.json: cannot read the file: No such file or directory; give a folder such as transformers' save_pretrained"
    )
    folder = folders.copied("gpt2", tmp_path / "folder")
    (folder / WHOLE).unlink()
    refused(folder, f"{folder}: expected {WHOLE} or {INDEX}, found neither; give a folder such as transformers' save_pretrained writes")
    refused(GOLDEN / "gpt2" / WHOLE, "expected the folder, because config.json beside it belongs to it; give '")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_a_pickle_is_refused_and_not_run(name, tmp_path):
    folder = folders.copied("gpt2", tmp_path / "folder")
    (folder / WHOLE).unlink()
    ran = tmp_path / "ran"
    (folder / name).write_bytes(f"cos\nmkdir\n(V{ran}\ntR.".encode())  # a pickle that makes a folder when it is loaded
    hint = "jpipe reads no pickle files: reading one runs whatever code is in it. Convert it where you trust it"
    refused(folder, f"{folder}: expected {WHOLE} or {INDEX}, found {name}; {hint}")
    refused(folder / name, f"'{folder / name}': {hint}")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, f"{folder / INDEX}: found '{name}'; {hint}")
    os.rename(folder / name, folder / WHOLE)  # under another name it is as little read
    (folder / INDEX).unlink()
    refused(folder, f"{folder / WHOLE}: expected a safetensors file, found: ")
    assert not ran.exists()


def test_tensors_that_are_missing_additional_or_of_another_shape_are_listed(tmp_path):
    def change(tensors):
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            del tensors[f"transformer.h.0.{name}"], tensors[f"transformer.h.1.{name}"]
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][:8]
        tensors["score.weight"] = tensors["score.bias"] = np.zeros(3, np.float32)

    folder = folders.copied("gpt2", tmp_path / "folder", change)
    missing = ", ".join(f"transformer.h.0.{name}" for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"))
    refused(
        folder,
        f"expected the 28 tensors of the model in config.json, found that 8 are missing: {missing}, transformer.h.1.ln_1.weight, …; 2 are "
        "not of this model: score.bias, score.weight; 1 has another shape: transformer.wpe.weight ([8, 16], not [16, 16]); with "
        "warm_start.mode=partial all matching tensors are used",
    )
    loaded = arrays(folder, strict=False)
    assert "embed/position/embedding" not in loaded
    assert "block_0/attention_norm/scale" not in loaded
    assert len(loaded) == 19


def test_one_tensor_is_reported_in_the_singular_and_a_long_name_is_shortened(tmp_path):
    def change(tensors):
        del tensors["transformer.ln_f.bias"]
        tensors["a" * 5000] = np.zeros(3, np.float32)

    folder = folders.copied("gpt2", tmp_path / "folder", change)
    refused(folder, "found that 1 is missing: transformer.ln_f.bias; 1 is not of this model: 'aaaaaaaaaaaa")
    with pytest.raises(InputError) as caught:
        huggingface.source(folder)
    assert len(str(caught.value)) < 500


def test_embeddings_that_are_padded_or_too_few_are_refused(tmp_path):
    """Some programs add rows beyond `vocab_size` to make a kernel faster."""
    for rows in (72, 60):
        folder = folders.copied(
            "llama",
            tmp_path / str(rows),
            lambda tensors, rows=rows: {key: np.resize(t, (rows, 16)) if 64 in t.shape else t for key, t in tensors.items()},
        )
        refused(folder, f"2 have another shape: model.embed_tokens.weight ([{rows}, 16], not [64, 16]), lm_head.weight ([{rows}, 16], not")


def test_files_that_are_cut_off_missing_or_elsewhere_are_refused(tmp_path):
    folder = folders.in_shards("llama", tmp_path / "folder")
    shard, index = folder / SHARD, json.loads((folder / INDEX).read_text())
    content = shard.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for size, least in ((len(content) - 1, f"{len(content):,}"), (400, f"at least {header:,}")):
        shard.write_bytes(content[:size])
        refused(folder, f"{shard}: expected {least} bytes, as its header says, found {size:,}: it is cut off; download it again")
    shard.write_bytes(content[:5])
    refused(folder, f"{shard}: expected a safetensors file, found: ")
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    refused(folder, f"{shard}: expected a safetensors file, found a pointer of Git LFS; fetch the file itself, with git lfs pull")
    shard.unlink()
    refused(folder, f"{shard}: expected a file, found none; download the whole folder again")
    os.mkfifo(shard)
    refused(folder, f"{shard}: expected a regular file, found none")
    shard.unlink()
    (tmp_path / SHARD).write_bytes(content)
    shard.symlink_to(tmp_path / SHARD)
    refused(folder, f"{shard}: expected a file inside the folder, found a link to {tmp_path / SHARD}; replace the link by the file")
    shard.unlink()
    for name in (f"../{SHARD}", f"/{SHARD}", ".."):
        (folder / INDEX).write_text(json.dumps(index | {"weight_map": dict.fromkeys(index["weight_map"], name)}))
        refused(folder, f"{folder / INDEX}: expected names of safetensors files in this folder, found '{name}'; correct the index")


@pytest.mark.parametrize("name", ["a\0.safetensors", "a\ud800.safetensors", "~/a.safetensors", "~nobody-of-that-name/a.safetensors", "\n"])
def test_names_that_no_file_in_the_folder_can_have_are_refused(name, tmp_path):
    folder = folders.in_shards("llama", tmp_path / "folder")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": dict.fromkeys(index["weight_map"], name)}))
    refused(folder, f"{folder / INDEX}: ")


@pytest.mark.parametrize("whole", [True, False], ids=["a file", "a folder"])
def test_weights_that_are_cut_off_while_they_are_read_are_reported(whole, tmp_path):
    """A memory map would end this process with SIGBUS."""
    folder = folders.copied("gpt2", tmp_path / "folder")
    if whole:
        (folder / "config.json").unlink()
    source = warm_start._source(folder / WHOLE if whole else folder, Config(), None, print)
    content = (folder / WHOLE).read_bytes()
    tensors = safetensors_file.TensorsFile

    class CutOff(tensors):
        def read(self, name):
            os.truncate(folder / WHOLE, 4000)
            return super().read(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "TensorsFile", CutOff)
        with pytest.raises(InputError, match=r"model\.safetensors.*: expected .*cut off"):
            list(source.read({"": list(source.specs)}))
    (folder / WHOLE).write_bytes(content)
    assert list(source.read({"": list(source.specs)}))


def test_tensors_are_read_as_the_library_reads_them(tmp_path):
    chance = np.random.default_rng(0)
    kinds = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
    tensors = {kind: chance.integers(0, 2, (3, 5)).astype(kind) for kind in kinds}
    tensors |= {
        "bfloat16": chance.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
        "one": np.asarray(3, np.float32),
        "none": np.zeros((0, 4)),
    }
    save_file(tensors, tmp_path / "all.safetensors")
    with safetensors_file.tensors_file(tmp_path / "all.safetensors", "all") as file:
        assert file.specs.keys() == tensors.keys()
        for name, expected in tensors.items():
            assert file.specs[name].shape == expected.shape
            assert file.read(name).dtype == expected.dtype
            np.testing.assert_array_equal(file.read(name), expected)


def test_a_link_of_a_download_leads_to_the_blobs_beside_it(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    folders.copied("gpt2", snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for name in (WHOLE, "config.json"):
        os.rename(snapshot / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert len(arrays(snapshot)) == 28


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", f"{INDEX}: expected JSON, found: "),
        ("[" * 100_000, f"{INDEX}: expected JSON, found too many nested lists"),
        ("[]", f"{INDEX}: expected a JSON object, found a list"),
        ('{"weight_map": {}}', f"{INDEX}: weight_map: "),
        ('{"weight_map": {"a": 3}}', f"{INDEX}: weight_map.a: expected a valid string, found 3"),
    ],
)
def test_an_invalid_index_is_refused(content, message, tmp_path):
    folder = folders.in_shards("llama", tmp_path / "folder")
    (folder / INDEX).write_text(content)
    refused(folder, message)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = folders.in_shards("llama", tmp_path / "folder")
    shutil.copy(folder / SHARD, folder / SHARD.replace("2-of", "1-of"))
    refused(folder, f"is in {SHARD.replace('2-of', '1-of')} and in {SHARD}; remove one of them")


def test_numbers_that_are_no_floats_are_refused(tmp_path):
    folder = folders.copied("gpt2", tmp_path / "folder", lambda tensors: {key: tensor.astype(np.int8) for key, tensor in tensors.items()})
    source = huggingface.source(folder)
    model = {"embed": {name: source.specs[name]._replace(dtype="float32") for name in ("embed/token/embedding",)}}
    with pytest.raises(InputError, match=re.escape("expected 'embed/token/embedding' as in the model, float32[64, 16], found I8[64, 16]")):
        warm_start.fitting(source, model, strict=True)


# Versions and kinds that are read ------------------------------------------------------------------------------------------


def test_files_of_older_versions_are_read(tmp_path):
    """They have names without the prefix, buffers, a copy of the tied embeddings, and gamma and beta."""
    expected = arrays(GOLDEN / "gpt2")

    def old(tensors):
        converted = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        converted["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
        return converted | {"lm_head.weight": tensors["transformer.wte.weight"]}

    actual = arrays(folders.copied("gpt2", tmp_path / "gpt2", old))
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], array) for name, array in expected.items())

    def gamma(tensors):
        renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        converted = {re.sub("|".join(renamed), lambda part: renamed[part[0]], key): tensor for key, tensor in tensors.items()}
        return converted | {"bert.embeddings.position_ids": np.arange(16)[None]}

    actual, expected = arrays(folders.copied("bert", tmp_path / "bert", gamma)), arrays(GOLDEN / "bert")
    assert all(np.array_equal(actual[name], array) for name, array in expected.items())


def test_tied_embeddings_that_differ_are_refused(tmp_path):
    folder = folders.copied("gpt2", tmp_path / "gpt2", lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})
    with pytest.raises(
        InputError, match=r"expected lm_head.weight to be the same as transformer.wte.weight, for config.json says that they"
    ):
        arrays(folder)


def test_a_masked_model_without_a_next_sentence_head_gets_a_fresh_one(tmp_path):
    """Transformers writes BertForMaskedLM without this head; a part of the head is a mistake."""
    config_changes = {"architectures": ["BertForMaskedLM"]}
    optional = ("bert.pooler.", "cls.seq_relationship.")

    def without(tensors):
        return {key: tensor for key, tensor in tensors.items() if not key.startswith(optional)}

    folder = folders.copied("bert", tmp_path / "without", without, config_changes)
    source = huggingface.source(folder)
    assert source.optional - source.specs.keys() == {
        f"head/{name}/{part}" for name in ("pooler", "next_sentence") for part in ("kernel", "bias")
    }
    model = {"head": {name: huggingface.source(GOLDEN / "bert").specs[name] for name in source.optional | source.specs.keys()}}
    assert warm_start.fitting(source, model, strict=True) == source.specs.keys()
    refused(folders.copied("bert", tmp_path / "pre", without), "4 are missing: bert.pooler.dense.weight")
    half = folders.copied(
        "bert", tmp_path / "half", lambda tensors: without(tensors) | {"bert.pooler.dense.bias": np.zeros(16, np.float32)}, config_changes
    )
    refused(half, "3 are missing: bert.pooler.dense.weight")
    assert len(arrays(folders.copied("bert", tmp_path / "both", None, config_changes))) == len(arrays(GOLDEN / "bert"))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_float_dtypes_are_read_unchanged(dtype, tmp_path):
    folder = folders.copied("llama", tmp_path / "folder", lambda tensors: {key: tensor.astype(dtype) for key, tensor in tensors.items()})
    actual, expected = arrays(folder), arrays(GOLDEN / "llama")
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array.astype(dtype), strict=True)


def test_the_digest_differs_between_folders(tmp_path):
    """The digest depends on the contents of files, of which it reads samples only."""
    digests = {huggingface.source(GOLDEN / "gpt2").digest(), huggingface.source(folders.copied("gpt2", tmp_path / "same")).digest()}
    for i, change in enumerate((lambda tensors: {key: tensor + 1 for key, tensor in tensors.items()}, None)):
        digests.add(huggingface.source(folders.copied("gpt2", tmp_path / str(i), change, {"n_head": 4} if change is None else {})).digest())
    assert len(digests) == 3 or len(digests) == 4  # safetensors may order the tensors of a copy otherwise
    assert huggingface.source(GOLDEN / "gpt2").digest() == huggingface.source(GOLDEN / "gpt2").digest()


def test_a_run_folder_is_not_a_hugging_face_folder(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save_file({"a": np.ones(3)}, tmp_path / "run" / "model.safetensors")  # an export of the user's
    assert not huggingface.is_meant(tmp_path / "run")
    config = folders.config(tmp_path, "gpt2", f"warm_start.file={tmp_path / 'run'}", "model.vocab_size=64")
    assert config.model.depth == 4, "no key is filled in"
