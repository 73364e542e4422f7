"""The kinds of models, formats of data and layouts of exports that this package adds to `jpipe_train`; `pyproject.toml` lists them."""

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
    """The section `tune` for language models. It knows the parameters of adapters and of quantized kernels."""

    def check_names(self, names: Sequence[str]) -> None:
        """Check that `train_only` does not select quantized kernels, and that the model has the layers named in `lora.targets`."""
        from jpipe_lm.models.lora import is_quantized, parts_of

        for pattern in self.train_only if self.quantize is not None else ():
            if any(is_quantized(name) and matches_any(name, [pattern]) for name in names):
                raise InputError(
                    f"tune.train_only: '{pattern}' selects quantized kernels; select other parameters, or remove tune.quantize"
                )
        for target in self.lora.targets or () if self.lora is not None else ():
            if not any(f"/lora/{target}/" in name for name in names):
                parts = {part for name in names for part in parts_of(name)}
                has = [name for name in TARGETS if name in parts]
                others = f"the model has {', '.join(has)}" if has else "the model has no layers for adapters"
                others += "; routed experts have no adapters" if any("/experts/" in name for name in names) else ""
                raise InputError(f"tune.lora.targets: expected layers of the model, found {target}; {others}")

    def adds(self, name: str) -> bool:
        """Return whether a parameter belongs to an adapter."""
        return is_of_adapter(name)

    def whole_names(self, names: list[str]) -> list[str]:
        """Return the names of parameters, and for quantized kernels also their names before quantization."""
        from jpipe_lm.checkpoint import adapters

        return adapters.whole_names(names)

    def source_for(
        self,
        source: "jpipe_train.checkpoint.sources.source.Source",
        specs: "dict[str, jpipe_train.checkpoint.sources.source.Spec]",
    ) -> "jpipe_train.checkpoint.sources.source.Source":
        """Return a source that reads whole weights from `source` and quantizes kernels. Adapters may be missing in `source`."""
        from jpipe_lm.checkpoint import adapters

        return adapters.for_adapters(source, specs, self)


class LanguageModel(ModelConfig):
    """The kinds `decoder` and `bert`."""

    tune_section: ClassVar[type[TuneSection]] = Tuning

    def build_layers(self, config: Config, inputs: Callable[[], Any] | None) -> "jpipe.LayerStack":
        """Return the layers of the model. The last layer leaves the logits to a loss that computes them in chunks."""
        from jpipe_lm.models.layers import layers

        chunk = config.loss.chunk_for(self.vocab_size) if self.head == "language" else None
        return layers(self.model_copy(update={"compute_dtype": config.computes}), chunk, tune_of(config))

    def check_plan(self, plan: jpipe.Plan) -> None:
        """Check that meshes do not split an attention head, and that all devices of a mesh get the same number of experts.

        The library itself checks the dimensions of parameters.
        """
        rules = mesh_rules(plan)
        for s, stage in enumerate(plan.stages):
            if not any(layer_id.startswith("block_") for layer_id in stage.layers):
                continue
            # Queries, keys and values share one kernel, so the rule of "heads" also applies to the heads of keys and values.
            counts = [("heads", "heads", self.heads), ("kv_heads", "heads", self.kv_heads_used)]
            counts += [] if self.experts is None else [("experts.count", "expert", self.experts.count)]
            for key, logical, count in counts:
                axis = rules[logical]
                degree = 1 if axis is None else stage.mesh.get(axis, 1)
                if count % degree:
                    what = "heads" if logical == "heads" else "experts"
                    raise InputError(
                        f"model.{key}: expected a multiple of {degree}, the size of the axis '{axis}' of the mesh of stage {s}, found "
                        f"{count}; change one of the two, or do not shard {what}: plan.rules={{{logical}: null}}"
                    )

    def remarks(self, config: Config) -> list[str]:
        """Return a remark about router losses if the user's own loss decides whether they count."""
        if config.loss.target is None or not self.has_router_loss:
            return []
        return [
            f"loss.target: {config.loss.target} decides whether router losses count (model.experts: balance_loss, z_loss); they are "
            'outputs["experts"].loss()'
        ]

    def extra_metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the experts, if the model has experts."""
        return {} if self.experts is None else _METRICS_OF_EXPERTS

    def input_limits(self) -> Mapping[str, Limit]:
        """Return the smallest and largest valid value of tokens and sentence types."""
        symbols = 0, self.vocab_size - 1, f"the built-in model has {self.vocab_size} symbols, model.vocab_size"
        return {"": symbols, "tokens": symbols, "types": (0, 1, "there are two sentences")}

    def knows(self, data: DataSection) -> bool:
        """Return whether data are text. Tokens of text are always symbols of the model."""
        return isinstance(data, DataConfig)


class Text(DataConfig):
    """The formats of text, from `bytes` to `preferences`."""

    def load_batches(self, config: Config) -> "jpipe_train.data.data.Data | None":
        """Read documents and cut them into rows. Return None for texts with labels and preferences."""
        from jpipe_lm.data import document_rows

        return document_rows.load(config) if self.has_tokens else None

    def load_held_out(self, config: Config, path: str | None) -> "jpipe_train.data.data.Data | None":
        """Read the held-out documents, or the documents at `path`. Return None for texts with labels and preferences."""
        from jpipe_lm.data import document_rows

        return document_rows.load_held_out(config, path) if self.has_tokens else None

    def read_examples(self, config: Config, path: str | None = None) -> "jpipe_train.data.data.Examples":
        """Read texts with labels, or preferences."""
        if self.format == "preferences":
            from jpipe_lm.preferences import read_pairs

            return read_pairs.read(config, path)
        from jpipe_lm.data.labelled import read_labelled

        return read_labelled.read(config, path)

    def check_files(self, config: Config, path: str | None = None) -> None:
        """Check the files, the tokenizer and the chat template, without reading any data."""
        from jpipe_lm.data import document_rows

        document_rows.check_files(config, path)

    def check_sources(self) -> None:
        """Check that all folders of tokens have the same tokenizer."""
        from jpipe_lm.data import splits

        if self.format == "tokens" and self.sources is not None:
            splits.check_tokenizers([source.path for source in self.sources])

    def amount_of_step(self, config: Config) -> tuple[int, str]:
        """Return the number of tokens of a step; for texts with labels and preferences, the number of samples."""
        return (config.train.batch_size * config.model.seq_len, "tokens") if self.has_tokens else super().amount_of_step(config)
