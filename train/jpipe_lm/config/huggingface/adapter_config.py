"""Read the `adapter_config.json` of a folder in PEFT's layout as keys of `tune.lora`, without JAX."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import shown, unusable
from jpipe_lm.config.huggingface.families import ARCHITECTURES
from jpipe_lm.config.huggingface.read_config import MOST_BYTES, Description, inside, load_json, validated
from jpipe_lm.config.tune_config import PARTS, TARGETS
from jpipe_train.registry import located

ADAPTER_CONFIG = "adapter_config.json"
_HINT = "jpipe does not support such adapters; use other adapters, or merge them into the model with PEFT"
_UNKNOWN = "jpipe does not know whether this key changes the adapters; if it does not, remove it, otherwise merge the adapters with PEFT"
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
}
_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ensure_weight_tying", "lora_bias", "use_bdlora", "use_dora", "use_qalora"), (False, None)),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # other values also change the weights of the model
    "loftq_config": ({}, None),
    **dict.fromkeys(("layer_replication", "layers_pattern", "layers_to_transform", "target_parameters"), (None, [])),
    **dict.fromkeys(("alora_invocation_tokens", "trainable_token_indices"), (None, [])),
    **dict.fromkeys(("arrow_config", "kasa_config", "megatron_config", "monteclora_config", "velora_config"), (None,)),
}
"""Keys of features that jpipe does not support, each with the values that turn the feature off. Messages name the first value."""

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Rank = Annotated[int, Field(ge=1, le=10**5)]
_MOST_ALPHA = 1e6
_Alpha = Annotated[float, Field(gt=0, le=_MOST_ALPHA, strict=False)]
_MOST_NAMES = 4096


class _Json(BaseModel):
    """The keys of `adapter_config.json` that are used."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    task_type: str | None = None
    r: _Rank = 8
    lora_alpha: _Alpha = 8.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.0
    target_modules: Annotated[list[_Name], Field(min_length=1, max_length=_MOST_NAMES)]
    exclude_modules: Annotated[list[_Name], Field(max_length=_MOST_NAMES)] | None = None
    use_rslora: bool = False
    rank_pattern: Annotated[dict[_Name, _Rank], Field(max_length=_MOST_NAMES)] | None = None
    alpha_pattern: Annotated[dict[_Name, _Alpha], Field(max_length=_MOST_NAMES)] | None = None
    modules_to_save: Annotated[list[_Name], Field(max_length=_MOST_NAMES)] | None = None


class Adapters(NamedTuple):
    """The adapters that an `adapter_config.json` describes."""

    lora: dict[str, Any]  # the keys of `tune.lora`
    ranks: Mapping[str, int]  # a mapping from names of modules, or ends of names, to ranks that differ from `lora.rank`
    alphas: Mapping[str, float]  # a mapping from names of modules, or ends of names, to values of alpha that differ from `lora.alpha`
    saved: tuple[str, ...]  # the names, or ends of names, of modules that are stored with all weights


def has_adapters(path: str) -> bool:
    """Return whether the path is a folder in PEFT's layout."""
    try:
        return unusable(path) is None and (located(path, "warm_start.adapters") / ADAPTER_CONFIG).is_file()
    except OSError:  # reported when the folder is read
        return False


def read_adapters(folder: Path, base: Description) -> Adapters:
    """Read the `adapter_config.json` of a folder in PEFT's layout.

    Raise InputError if it cannot be read, or describes adapters that jpipe does not support or that do not belong to the model.
    """
    file = inside(folder, ADAPTER_CONFIG)
    where, data = shown(folder / ADAPTER_CONFIG), load_json(file, MOST_BYTES)
    known = {key: value for key, value in data.items() if key not in _WITHOUT_EFFECT}
    if (kind := known.get("peft_type")) != "LORA":
        raise InputError(f'{where}: peft_type: expected "LORA", found {short(kind)}; {_HINT}')
    for key, value in known.items():
        if key in _OFF and value is not None and not any(value == off and type(value) is type(off) for off in _OFF[key]):
            raise InputError(f"{where}: {key}: expected {_in_json(_OFF[key][0])}, found {short(value)}; {_HINT}")
        if key not in _OFF and key not in _Json.model_fields and value is not None:
            raise InputError(f"{where}: unknown key {short(key)}; {_UNKNOWN}")
    for key in ("target_modules", "exclude_modules"):
        if isinstance(pattern := known.get(key), str):
            raise InputError(f"{where}: {key}: expected a list of names, found {short(pattern)}; replace it by a list of names")
    json = validated(_Json, {key: value for key, value in known.items() if key in _Json.model_fields}, where)
    ranks, alphas = json.rank_pattern or {}, json.alpha_pattern or {}
    if json.use_rslora and (ranks or alphas):
        raise InputError(f"{where}: use_rslora: expected false with rank_pattern or alpha_pattern, found true; {_HINT}")
    alpha = json.lora_alpha * math.sqrt(json.r) if json.use_rslora else json.lora_alpha
    if alpha > _MOST_ALPHA:
        most = f"lora_alpha · √r up to {_MOST_ALPHA:,.0f}"
        raise InputError(f"{where}: lora_alpha: expected {most} with use_rslora, found {alpha:,.0f}; {_HINT}")
    for name in (*ranks, *alphas):
        if not name.replace(".", "").replace("_", "").isalnum():
            raise InputError(f"{where}: rank_pattern, alpha_pattern: expected names of modules, found {short(name)}; write names")
    lora = {
        "rank": json.r,
        "alpha": alpha,
        "targets": _targets(json.target_modules, json.exclude_modules or [], base, where),
        "dropout": json.lora_dropout,
    }
    classifiers = ("classifier", "score") if json.task_type == "SEQ_CLS" else ()
    return Adapters(lora, ranks, alphas, (*(json.modules_to_save or ()), *classifiers))


def fill_lora(section: Mapping[str, Any], folder: Path, base: Description, where: str) -> dict[str, Any]:
    """Return the section `tune.lora` with the keys that a folder in PEFT's layout determines, which `section` must not contradict."""
    keys = read_adapters(folder, base).lora
    explicit = {key: value for key, value in section.items() if value is not None}
    lines = [
        f"{where}: tune.lora.{key}: expected {_in_json(keys[key])} as in {shown(folder / ADAPTER_CONFIG)}, found {short(explicit[key])}; "
        f"remove {key}"
        for key in keys
        if key in explicit and _comparable(explicit[key]) != _comparable(keys[key])
    ]
    if lines:
        raise InputError(*lines)
    return {**section, **keys}


def module_parts(names: list[str], linears: list[tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of modules that together compute linear layers, each with the parts that it computes, such as queries and keys."""
    parts = tuple(part for linear in linears for part in linear)
    return [(names[0], parts)] if len(names) == 1 else [(name, (part,)) for name, part in zip(names, parts, strict=False)]


def _targets(wanted: list[str], excluded: list[str], base: Description, where: str) -> list[str]:
    """Return the parts of linear layers that the names `wanted`, but not the names `excluded`, select; ends of names are allowed."""
    found: set[str] = set()
    used: set[str] = set()
    without: dict[str, str] = {}  # for each part of excluded modules, one of these modules
    for module, parts in _modules(base):
        if not (ends := [name for name in wanted if is_or_ends(module, name)]):
            continue
        used.update(ends)
        if any(is_or_ends(module, name) for name in excluded):
            without |= dict.fromkeys(parts, module)
        else:
            found.update(parts)
    if unknown := [name for name in wanted if name not in used]:
        raise InputError(
            f"{where}: target_modules: expected names of linear layers of the blocks, such as {next(_modules(base))[0]}, found "
            f"{short(unknown[0])}; {_HINT}"
        )
    if some := sorted(found & without.keys()):
        raise InputError(
            f"{where}: exclude_modules: expected each module excluded in all blocks or in none, found {without[some[0]]} excluded, but "
            f"not the same module of other blocks; {_HINT}"
        )
    if not found:
        raise InputError(f"{where}: exclude_modules: expected it to keep some of target_modules, found all excluded; {_HINT}")
    return [target for target in TARGETS if target in found]


def is_or_ends(module: str, name: str) -> bool:
    """Return whether the name of a module equals `name`, or ends with it after a dot."""
    return module == name or module.endswith(f".{name}")


def is_saved(module: str, saved: Collection[str]) -> bool:
    """Return whether PEFT stores all weights of a module: its name, or the name of a module around it, ends with a name in `saved`."""
    parts = module.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(name.endswith(end) for name in around for end in saved)


def _modules(base: Description) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the parts of each module of the blocks that may have adapters."""
    tensors = ARCHITECTURES[base.architecture].tensors
    for i in range(base.keys["depth"]):
        for ours, theirs in tensors.block.items():
            kinds = [name.removeprefix("experts/shared/") for name in ours.split(",")]
            if all(kind in PARTS for kind in kinds):
                names = [f"{tensors.layer.format(i)}{name}" for name in theirs.split(",")]
                yield from module_parts(names, [PARTS[kind] for kind in kinds])


def _comparable(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value


def _in_json(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
