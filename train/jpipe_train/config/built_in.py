"""The built-in parts that a config can name as a `target` in place of a user's function, such as `model.target: gnmt`."""

from collections.abc import Mapping
from types import MappingProxyType

from jpipe_train.config.section import BuiltIn
from jpipe_train.config.targets import sequence_config, vision_config

MODELS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "alexnet": BuiltIn(vision_config.Alexnet, "jpipe_train.models.images.vgg:alexnet"),
        "vgg16": BuiltIn(vision_config.Vgg16, "jpipe_train.models.images.vgg:vgg16"),
        "resnet50": BuiltIn(vision_config.Resnet50, "jpipe_train.models.images.resnet:layers"),
        "inception_v3": BuiltIn(vision_config.InceptionV3, "jpipe_train.models.images.inception:layers"),
        "gnmt": BuiltIn(sequence_config.Gnmt, "jpipe_train.models.gnmt:layers"),
        "awd_lm": BuiltIn(sequence_config.AwdLm, "jpipe_train.models.awd_lm:layers"),
        "s2vt": BuiltIn(sequence_config.S2vt, "jpipe_train.models.s2vt:layers"),
    }
)
"""`model.target`. Called with (arguments, rows of a batch), they return a `jpipe.LayerStack`."""

DATA: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "images": BuiltIn(vision_config.ImagesData, "jpipe_train.data.targets.images:load"),
        "translation": BuiltIn(sequence_config.TranslationData, "jpipe_train.data.targets.translation:load"),
        "words": BuiltIn(sequence_config.WordsData, "jpipe_train.data.targets.words:load"),
        "captions": BuiltIn(sequence_config.CaptionsData, "jpipe_train.data.targets.captions:load"),
    }
)
"""`data.target`. Called with (arguments, seed, rows of a batch), they return a `jpipe_train.data.data.Data`."""

LOSSES: Mapping[str, BuiltIn] = MappingProxyType(
    {"smoothed_cross_entropy": BuiltIn(sequence_config.SmoothedLoss, "jpipe_train.models.cross_entropy:smoothed")}
)
"""`loss.target`. Called with (outputs, labels, arguments), they return (sum, weight)."""
