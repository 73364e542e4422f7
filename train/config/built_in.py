"""Built-in parts that a config names in place of code of its own: `model.target: gnmt` with its `model.arguments`, and so on."""

from collections.abc import Mapping
from types import MappingProxyType

from train.config.section import BuiltIn
from train.config.targets import sequence_config, vision_config

MODELS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "alexnet": BuiltIn(vision_config.Alexnet, "train.models.images.vgg:alexnet"),
        "vgg16": BuiltIn(vision_config.Vgg16, "train.models.images.vgg:vgg16"),
        "resnet50": BuiltIn(vision_config.Resnet50, "train.models.images.resnet:layers"),
        "inception_v3": BuiltIn(vision_config.InceptionV3, "train.models.images.inception:layers"),
        "gnmt": BuiltIn(sequence_config.Gnmt, "train.models.gnmt:layers"),
        "awd_lm": BuiltIn(sequence_config.AwdLm, "train.models.awd_lm:layers"),
        "s2vt": BuiltIn(sequence_config.S2vt, "train.models.s2vt:layers"),
    }
)
"""`model.target`. Called with (arguments, rows of a batch), they return a `jpipe.LayerStack`."""

DATA: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "images": BuiltIn(vision_config.ImagesData, "train.data.targets.images:load"),
        "translation": BuiltIn(sequence_config.TranslationData, "train.data.targets.translation:load"),
        "words": BuiltIn(sequence_config.WordsData, "train.data.targets.words:load"),
        "captions": BuiltIn(sequence_config.CaptionsData, "train.data.targets.captions:load"),
    }
)
"""`data.target`. Called with (arguments, seed, rows of a batch), they return a `train.data.data.Data`."""

LOSSES: Mapping[str, BuiltIn] = MappingProxyType(
    {"smoothed_cross_entropy": BuiltIn(sequence_config.SmoothedLoss, "train.models.cross_entropy:smoothed")}
)
"""`loss.target`. Called with (outputs, labels, arguments), they return (sum, weight)."""
