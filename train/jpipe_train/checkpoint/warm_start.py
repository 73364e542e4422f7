"""Warm starts: begin a run with parameters from a file, another run or an Orbax checkpoint."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jpipe
from jpipe import InputError
from jpipe.checkpoints import layers_to_read
from jpipe.checkpoints.records import describe
from jpipe.files import resolved, shown
from jpipe_train import registry
from jpipe_train.assemble.build import param_specs
from jpipe_train.checkpoint.sources import orbax_checkpoint
from jpipe_train.checkpoint.sources.name_map import of_whole_model, renamed
from jpipe_train.checkpoint.sources.safetensors_file import TensorsFile, tensors_file
from jpipe_train.checkpoint.sources.source import Format, Names, Source, Spec
from jpipe_train.checkpoint.weights import SavedWeights, by_path, choose, state_name
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count
from jpipe_train.launch.team import Team

_FILE = "warm_start.file"
_SHOWN = 3  # number of layers that a message lists
_EXPECTED = "a safetensors file, or the folder of a run, of an Orbax checkpoint or of Hugging Face's layout"
_HINT = "is it of another model? With warm_start.mode=partial all parameters with matching names and shapes are used"


Model = Mapping[str, Mapping[str, Spec]]
"""Specs of a model's parameters, by layer id and name in an export."""


def load(
    config: Config,
    pipe: jpipe.Pipeline,
    batch: Any,
    team: Team,
    say: Callable[[str], None],
) -> dict[str, dict[str, np.ndarray]]:
    """Read the parameters of this process's layers for `Pipeline.init`, by layer id and path. All processes call this.

    `say` prints a line about the layers that are used. Raise InputError if the file cannot be read, does not match the model, or differs
    between processes.
    """
    path, strict = _file(config), config.warm_start.mode == "strict"
    specs = pipe.stack.ties.without_seconds(param_specs(pipe.stack, pipe.plan, batch))
    model = {
        layer_id: {f"{layer_id}/{name}": Spec(leaf.shape, str(leaf.dtype)) for name, leaf in by_path(tree).items()}
        for layer_id, tree in specs.items()
    }

    def find() -> tuple[Source, set[str]]:
        by_name = {name: spec for specs in model.values() for name, spec in specs.items()}
        source = _source(path, config, by_name, lambda line: say(f"warm start: {line}"))
        source = _by_name(source, config, pipe, by_name)
        return source, fitting(source, model, strict=strict)

    def read() -> dict[str, dict[str, np.ndarray]]:
        names = {layer_id: [name for name in model[layer_id] if name in matching] for layer_id in layers_to_read(pipe)}
        layer_of = {name: layer_id for layer_id, inner in names.items() for name in inner}
        params: dict[str, dict[str, np.ndarray]] = {layer_id: {} for layer_id in names}
        for arrays in source.read({layer_id: inner for layer_id, inner in names.items() if inner}):
            for name in arrays.keys() & layer_of.keys():
                layer_id = layer_of[name]
                dtype = jnp.dtype(model[layer_id][name].dtype)
                params[layer_id][name.removeprefix(f"{layer_id}/")] = arrays[name].astype(dtype, copy=False)
        return params

    source, matching = team.run_on_all(find)
    team.agree(lambda: {"warm_start.file": source.digest()})
    say(_summary(source, model, matching, config.tune.adds))
    return team.run_on_all(read)


def check_files(config: Config) -> None:
    """Check, from the headers alone, that the files of `warm_start` can be read. Raise InputError if a file cannot be read."""
    _source(_file(config), config, None, lambda _: None)


def _file(config: Config) -> Path:
    return resolved(str(registry.located(str(config.warm_start.file), _FILE)), _FILE)


def _by_name(source: Source, config: Config, pipe: jpipe.Pipeline, model: dict[str, Spec]) -> Source:
    """Return the source with the names of the model's parameters."""
    names = config.warm_start.names
    sources = [renamed(source, names, config.tune.whole_names(list(model))) if names else source]
    if pipe.stack.traced is not None:
        places = pipe.stack.traced.places()
        sources += [of_whole_model(source, places, names, separator) for separator in "/."]
    return config.tune.source_for(max(sources, key=lambda source: len(source.specs.keys() & model.keys())), model)


def fitting(source: Source, model: Model, *, strict: bool, hint: str = _HINT) -> set[str]:
    """Return the names and specs of the model's parameters that a source has; `hint` says what to change after an error.

    Raise InputError if no parameter matches, or if some are missing or additional and `strict` is set.
    """
    wanted = {name: spec for specs in model.values() for name, spec in specs.items()}
    if strict:
        _check_equal(source, wanted, tuple(f"{state_name(layer_id)}/" for layer_id in model), hint)
    matching = {name for name, spec in wanted.items() if name in source.specs and source.specs[name].fits(spec)}
    if not matching:
        if same := next((name for name in wanted if name in source.specs), None):
            raise InputError(
                f"nothing matches: expected '{same}' as in the model, {wanted[same]}, found {source.specs[same]}", where=source.where
            )
        stored, expected = (next(iter(names), "none at all") for names in (source.specs, wanted))
        raise InputError(
            where=source.where,
            expected=f"names and shapes as in the model ('{expected}', …)",
            found=f"'{stored}', …",
            change="rename them (warm_start.names)",
        )
    return matching


def _check_equal(source: Source, wanted: Mapping[str, Spec], ignored: tuple[str, ...], hint: str) -> None:
    """Check that a source has exactly the wanted parameters, except names that start with one of `ignored`."""
    for name, spec in wanted.items():
        stored = source.specs.get(name)
        if stored is None and name in source.optional:
            continue
        if stored is None or not (stored.fits(spec) if source.converts else stored == spec):
            other = source.in_file.get(name, name)
            absent = "no such name" if other == name else f"no '{other}', its name in the file"
            raise InputError(where=source.where, expected=f"'{name}' as in the model, {spec}", found=stored or absent, change=hint)
    for name, spec in source.specs.items():
        if name not in wanted and not name.startswith(ignored):
            raise InputError(where=source.where, expected="only parameters of the model", found=f"'{name}', {spec}", change=hint)


def _source(path: Path, config: Config, specs: Mapping[str, Spec] | None, report: Callable[[str], None]) -> Source:
    formats: list[Format] = [registry.find("sources", name) for name in registry.names("sources")]
    if (found := next((form for form in formats if form.opens(path)), None)) is not None:
        return found.open_source(path, config.warm_start, config.model, specs)
    if config.warm_start.adapters is not None:
        raise InputError(
            f"warm_start.adapters: expected warm_start.file to be the folder of their base model, found '{shown(path)}'; give that folder"
        )
    if not os.path.isdir(path):
        return _of_file(path)
    if orbax_checkpoint.is_meant(path):
        return orbax_checkpoint.source(path)
    return _of_run(path, report)


def _of_file(path: Path) -> Source:
    where = f"warm_start.file: '{shown(path)}'"

    @contextlib.contextmanager
    def opened() -> Iterator[TensorsFile]:
        if path.exists() and not path.is_file():
            raise InputError(where=where, expected=_EXPECTED, found="no regular file", change="give another one")
        with tensors_file(path, where, _EXPECTED, "give another one") as file:
            yield file

    def read(names: Names) -> Iterator[dict[str, Any]]:
        with opened() as file:
            for inner in names.values():
                yield {name: file.read(name) for name in inner}

    def digest() -> str:
        with opened():
            return describe(path).sha256

    with opened() as file:
        specs = file.specs
    return Source(where, specs, read, digest)


def _of_run(folder: Path, report: Callable[[str], None]) -> Source:
    saved = SavedWeights(choose(folder, None, "warm_start.file", report))

    def read(names: Names) -> Iterator[dict[str, Any]]:
        wanted = [name for inner in names.values() for name in inner]
        for layer_id in dict.fromkeys(saved.layers.values()):
            if any(name.startswith(f"{layer_id}/") for name in wanted):
                yield saved.read([layer_id])

    return Source(f"warm_start.file: '{shown(folder)}', step {saved.checkpoint.step}", saved.specs, read, lambda: saved.checkpoint.digest)


def _summary(source: Source, model: Model, matching: Collection[str], adds: Callable[[str], bool]) -> str:
    """Describe how many layers are fully used, and why the first of the other layers are not."""
    incomplete = []
    fresh = {name for specs in model.values() for name in specs if adds(name) and name not in matching}
    for layer_id, specs in model.items():
        if missing := [name for name in specs if name not in matching and name not in fresh]:
            stored = source.specs.get(missing[0])
            problem = "missing" if stored is None else f"{stored} in the file, {specs[missing[0]]} in the model"
            incomplete.append(f"{layer_id} ('{missing[0]}' is {problem})")
    layers = sum(bool(specs) for specs in model.values())
    words = f"warm start: {layers - len(incomplete)} of {count(layers, 'layer')} from {source.where.removeprefix('warm_start.file: ')}"
    words += "; the adapters are fresh" if fresh else ""
    if incomplete:
        words += f"; at least partly fresh: {', '.join(incomplete[:_SHOWN])}"
        words += f" and {len(incomplete) - _SHOWN} more" if len(incomplete) > _SHOWN else ""
    return words
