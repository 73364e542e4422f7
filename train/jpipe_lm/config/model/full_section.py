"""The key `model.full_attention` of a config: how blocks without the window differ from blocks with it."""

from jpipe_train.config.section import Count, Section


class FullConfig(Section):
    """Blocks without the window have heads of `head_size` and `kv_heads` heads of keys. With `keys_as_values` keys are also the values."""

    head_size: Count
    kv_heads: Count
    keys_as_values: bool = False
