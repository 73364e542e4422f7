"""What this package adds to `jpipe_train`, as `pyproject.toml` lists it: kinds of models, formats of data, layouts of exports."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import jpipe
from jpipe import InputError
from jpipe.plan import mesh_rules
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.sections import tune_of
from jpipe_lm.config.tune_config import TARGETS, TuneConfig, is_of_adapter
from jpipe_train.config.config import Config
from jpipe_train.config.data_section import DataSection
from jpipe_train.config.model_section import Limit
from jpipe_train.config.tune_section import TuneSection, matches_any

if TYPE_CHECKING:
    import jpipe_train.checkpoint.sources.source
    import jpipe_train.data.data

_METRICS_OF_EXPERTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "busiest_expert": lambda outputs, labels: outputs["experts"].busiest(),
        "unused_experts": lambda outputs, labels: outputs["experts"].unused(),
    }
)


class Tuning(TuneConfig):
    """The section `tune` for language models, with how adapters and quantized kernels begin."""

    def check_names(self, names: Sequence[str]) -> None:
        """Check that `train_only` names no quantized kernels, and that the model has the layers that get adapters.

        Raises:
            InputError: it does not hold.
        """
        from jpipe_lm.models.lora import is_quantized, parts_of

        for pattern in self.train_only if self.quantize is not None else ():
            if any(is_quantized(name) and matches_any(name, [pattern]) for name in names):
                raise InputError(f"tune.train_only: '{pattern}' names quantized kernels; name other parameters, or leave out tune.quantize")
        for target in self.lora.targets or () if self.lora is not None else ():
            if not any(f"/lora/{target}/" in name for name in names):
                parts = {part for name in names for part in parts_of(name)}
                has = [name for name in TARGETS if name in parts]
                others = f"it has {', '.join(has)}" if has else "it has none of these layers"
                others += "; routed experts have no adapters" if any("/experts/" in name for name in names) else ""
                raise InputError(f"tune.lora.targets: expected layers that the model has, found {target}, which it lacks; {others}")

    def adds(self, name: str) -> bool:
        """Return whether a parameter is of an adapter."""
        return is_of_adapter(name)

    def whole_names(self, names: list[str]) -> list[str]:
        """Return the names of parameters, and of the whole kernels of quantized ones."""
        from jpipe_lm.checkpoint import adapters

        return adapters.whole_names(names)

    def source_for(
        self,
        source: "jpipe_train.checkpoint.sources.source.Source",
        specs: "dict[str, jpipe_train.checkpoint.sources.source.Spec]",
    ) -> "jpipe_train.checkpoint.sources.source.Source":
        """Return a source of whole weights as one in which adapters may be missing, and kernels are quantized."""
        from jpipe_lm.checkpoint import adapters

        return adapters.for_adapters(source, specs, self)


class LanguageModel(ModelConfig):
    """The kinds `decoder` and `bert`."""

    tune_section: ClassVar[type[TuneSection]] = Tuning

    def build_layers(self, config: Config, inputs: Callable[[], Any] | None) -> "jpipe.LayerStack":
        """Return the layers of the model; its logits are left to the loss if that computes them in chunks."""
        from jpipe_lm.models.layers import layers

        chunk = config.loss.chunk_for(self.vocab_size) if self.head == "language" else None
        return layers(self.model_copy(update={"compute_dtype": config.computes}), chunk, tune_of(config))

    def check_plan(self, plan: jpipe.Plan) -> None:
        """Check that no device would have a part of a head, and that each has as many experts.

        The library itself checks the dimensions of parameters.

        Raises:
            InputError: a mesh does not divide the heads or the experts.
        """
        rules = mesh_rules(plan)
        for s, stage in enumerate(plan.stages):
            if not any(layer_id.startswith("block_") for layer_id in stage.layers):
                continue
            # Queries, keys and values share one kernel, with the rule of "heads".
            counts = [("heads", "heads", self.heads), ("kv_heads", "heads", self.kv_heads_used)]
            counts += [] if self.experts is None else [("experts.count", "expert", self.experts.count)]
            for key, logical, count in counts:
                axis = rules[logical]
                degree = 1 if axis is None else stage.mesh.get(axis, 1)
                if count % degree:
                    what = "heads" if logical == "heads" else "experts"
                    raise InputError(
                        f"model.{key}: expected a multiple of {degree}, the size of the axis '{axis}' of the mesh of stage {s}, found "
                        f"{count}; change one of them, or leave {what} whole: plan.rules={{{logical}: null}}"
                    )

    def remarks(self, config: Config) -> list[str]:
        """Say who decides about router losses, if a loss of the user's does."""
        if config.loss.target is None or not self.has_router_loss:
            return []
        return [
            f"loss.target: {config.loss.target} decides whether router losses count (model.experts: balance_loss, z_loss); it gets "
            'them as outputs["experts"].loss()'
        ]

    def extra_metrics(self) -> Mapping[str, Any]:
        """Return metrics of the experts."""
        return {} if self.experts is None else _METRICS_OF_EXPERTS

    def input_limits(self) -> Mapping[str, Limit]:
        """Return the legal values of tokens and sentence types."""
        symbols = 0, self.vocab_size - 1, f"the built-in model has {self.vocab_size} symbols, model.vocab_size"
        return {"": symbols, "tokens": symbols, "types": (0, 1, "there are two sentences")}

    def knows(self, data: DataSection) -> bool:
        """Return whether data are text: its tokens are known to be symbols of the model."""
        return isinstance(data, DataConfig)


class Text(DataConfig):
    """The formats of text, from `bytes` to `labels`."""

    def load_batches(self, config: Config) -> "jpipe_train.data.data.Data | None":
        """Read documents and cut them into rows; None for texts with labels."""
        from jpipe_lm.data import of_documents

        return None if self.format == "labels" else of_documents.load(config)

    def load_held_out(self, config: Config, path: str | None) -> "jpipe_train.data.data.Data | None":
        """Read all documents that are held out, or those at `path`; None for texts with labels."""
        from jpipe_lm.data import of_documents

        return None if self.format == "labels" else of_documents.load_held_out(config, path)

    def read_examples(self, config: Config, path: str | None = None) -> "jpipe_train.data.data.Examples":
        """Read texts with labels."""
        from jpipe_lm.data.labelled import reading

        return reading.read(config, path)

    def check_files(self, config: Config, path: str | None = None) -> None:
        """Check the files, the tokenizer and the chat template, without reading any data."""
        from jpipe_lm.data import of_documents

        of_documents.check_files(config, path)

    def check_sources(self) -> None:
        """Check that all folders of tokens have the same tokenizer."""
        from jpipe_lm.data import splits

        if self.format == "tokens" and self.sources is not None:
            splits.check_tokenizers([source.path for source in self.sources])

    def amount_of_step(self, config: Config) -> tuple[int, str]:
        """Return the tokens of a step, or the samples of texts with labels."""
        return (config.train.batch_size * config.model.seq_len, "tokens") if self.has_tokens else super().amount_of_step(config)
