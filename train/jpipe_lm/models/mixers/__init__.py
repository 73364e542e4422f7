"""What is in the place of usual attention in some models: latent attention, and the gated delta rule."""

from jpipe_lm.models.mixers.delta_rule import GatedDelta, carry_of
from jpipe_lm.models.mixers.latent_attention import Latents

__all__ = ["GatedDelta", "Latents", "carry_of"]
