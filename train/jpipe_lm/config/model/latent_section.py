"""The key `model.latent` of a config: attention with queries, keys and values from latents."""

from jpipe_train.config.section import Count, Section


class LatentConfig(Section):
    """Keys and values are computed from latents of `keys` numbers, and queries from latents of `queries` numbers or, with null, directly.

    `rotary` numbers of each head rotate with the position; for keys these are the same in all heads. The other numbers of a head, up to
    `head_size`, do not rotate. A value has `values` numbers.
    """

    keys: Count
    queries: Count | None = None
    rotary: Count
    values: Count
