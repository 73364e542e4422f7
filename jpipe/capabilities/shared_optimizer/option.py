"""The option to divide a stage's optimizer state among its replicas (ZeRO stage 1): each updates some layers. No number changes."""

from typing import TYPE_CHECKING

from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError

if TYPE_CHECKING:
    import jpipe


def check(plan: "jpipe.Plan") -> None:
    """Check that some stage has replicas, because replicas send each other what they have updated."""
    if max(plan.replicas) == 1:
        raise InputError(
            key="shard_optimizer", expected="a stage with replicas", found="none", change="remove it, or give a stage replicas"
        )


OPTION = Option(
    room="shared_optimizer",
    field="shard_optimizer",
    check=check,
    exclusions=(
        Exclusion("shard_optimizer", "update_every", "replicas exchange what they have updated once per batch", "change one of them"),
        Exclusion(
            "shard_optimizer",
            "max_in_flight",
            "with few microbatches in flight its replicas may wait for each other's weights forever",
            without_flush=True,
        ),
        Exclusion(
            "ema_decay",
            "shard_optimizer",
            "the average is in the optimizer state, and each replica has a part of it, but an evaluation needs the whole average",
        ),
    ),
    divides_updates=True,
)
