"""The parts of the table of families for mixtures of experts."""

from typing import Annotated, Any

from pydantic import Field

from jpipe_lm.config.huggingface.parts import KeyGroup, Keys, Size, agreed, expanded, shortened

_Factor = Annotated[float, Field(ge=0, le=1e6)]
OF_THE_LOSS = ("balance_loss", "z_loss")
"""The keys of `model.experts` that change the loss, and not the model."""


def experts(
    count: tuple[str, ...],
    width: str,
    *,
    defaults: tuple[int, int, float],
    width_default: int | None = None,
    renormalizes: bool | None = None,
    dense_layers: bool = False,
    shared: bool = False,
) -> KeyGroup:
    """Return the part for a mixture of experts.

    Args:
        count: the JSON keys that may have the number of experts; the first is written.
        width: the JSON key of the width of an expert.
        defaults: the number of experts, the experts per token, and the factor of the load-balancing loss.
        width_default: the default of `width`; None if another part has that key.
        renormalizes: whether the probabilities of the chosen experts are divided by their sum; None if `norm_topk_prob` says so.
        dense_layers: whether `mlp_only_layers` and `decoder_sparse_step` may say that some blocks have no experts.
        shared: whether an MLP with a gate computes every token as well.
    """
    fields: dict[str, tuple[Any, Any]] = {
        **dict.fromkeys(count, (Size | None, None)),
        "num_experts_per_tok": (Size, defaults[1]),
        "router_aux_loss_coef": (_Factor, defaults[2]),
        "output_router_logits": (bool, False),
        **({"norm_topk_prob": (bool, False)} if renormalizes is None else {}),
        **({"decoder_sparse_step": (Size, 1), "mlp_only_layers": (list[Annotated[int, Field(ge=0)]] | None, None)} if dense_layers else {}),
        **({"shared_expert_intermediate_size": (Size, 5632)} if shared else {}),
        **({} if width_default is None else {width: (Size, width_default)}),
    }

    def read(json: Keys, keys: Keys) -> Keys:
        number = agreed(count[0], [json[key] for key in count], defaults[0], count[-1])
        layers = _layers_with_experts(json, keys["depth"]) if dense_layers else None
        if layers == [False]:
            return {"experts": None}
        mixture = {
            **{"count": number, "per_token": json["num_experts_per_tok"], "mlp_width": json[width], "layers": layers},
            "renormalize": json["norm_topk_prob"] if renormalizes is None else renormalizes,
            **{"shared_mlp_width": json["shared_expert_intermediate_size"] if shared else None, "shared_gate": shared},
            **{"balance_loss": json["router_aux_loss_coef"] if json["output_router_logits"] else 0.0, "z_loss": 0.0},
        }
        return {"experts": mixture}

    def write(keys: Keys) -> Keys:
        if (mixture := keys["experts"]) is None:
            return {}
        return {
            **{count[0]: mixture["count"], "num_experts_per_tok": mixture["per_token"], width: mixture["mlp_width"]},
            **({"router_aux_loss_coef": mixture["balance_loss"]} if mixture["balance_loss"] else {}),  # of 0 readers take their default
            "output_router_logits": mixture["balance_loss"] > 0,
            **({"norm_topk_prob": mixture["renormalize"]} if renormalizes is None else {}),
            **(_dense_layers(keys) if dense_layers else {}),
            **({"shared_expert_intermediate_size": mixture["shared_mlp_width"]} if shared else {}),
        }

    return KeyGroup(fields, read, write, {"experts": count[0]})


def _layers_with_experts(json: Keys, depth: int) -> Any:
    """Return which blocks have experts, as the key `layers`."""
    step, dense = json["decoder_sparse_step"], json["mlp_only_layers"] or []
    return shortened([(i + 1) % step == 0 and i not in dense for i in range(depth)], depth)


def _dense_layers(keys: Keys) -> Keys:
    """Return the JSON keys for blocks without experts: every nth block has experts, or a list names the blocks without."""
    layers = shortened(keys["experts"]["layers"], keys["depth"]) or [True]
    if not any(layers[:-1]):
        return {"mlp_only_layers": [], "decoder_sparse_step": len(layers)}
    chosen = expanded(layers, keys["depth"])
    return {"mlp_only_layers": [i for i, has_experts in enumerate(chosen) if not has_experts], "decoder_sparse_step": 1}


def canonical_experts(keys: Keys) -> Keys:
    """Return the keys `experts` and `mlp_width`, which has no effect where all blocks have experts, written in one way."""
    if (mixture := keys["experts"]) is None:
        return {}
    layers = shortened(mixture["layers"], keys["depth"])
    return {"experts": {**mixture, "layers": layers}, **({"mlp_width": mixture["mlp_width"]} if layers is None else {})}


def without_losses(value: Any) -> Any:
    """Return the key `experts` without the values that change only the loss."""
    return {key: one for key, one in value.items() if key not in OF_THE_LOSS} if isinstance(value, dict) else value
