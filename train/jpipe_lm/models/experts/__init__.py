"""Mixtures of experts: routers, experts, and the exchange of tokens between devices."""

from jpipe_lm.models.experts.mixture import Experts, on_stage
from jpipe_lm.models.experts.routing import Routing, no_routing

__all__ = ["Experts", "Routing", "no_routing", "on_stage"]
