"""The key `model.attention_temperature` of a config: queries that grow with the position."""

from typing import Annotated

from pydantic import Field

from jpipe_train.config.section import Count, Section


class TemperatureConfig(Section):
    """In blocks without rotary positions the query at position p is multiplied by 1 + `scale` · ln(1 + ⌊(p + 1) / `positions`⌋)."""

    positions: Count = 8192
    scale: Annotated[float, Field(gt=0, le=1e6)] = 0.1
