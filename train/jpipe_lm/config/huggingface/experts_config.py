"""The key groups of the table of families for mixtures of experts."""

from typing import Annotated, Any

from pydantic import Field

from jpipe_lm.config.huggingface.parts import KeyGroup, Keys, Number, Size, agreed, expanded, only, shortened
from jpipe_lm.config.model.experts_section import ExpertsConfig

_Factor = Annotated[float, Field(ge=0, le=1e6)]
OF_THE_LOSS = ("balance_loss", "z_loss")
"""The keys of `model.experts` that change only the loss, not the model."""
_DEFAULTS = {name: field.default for name, field in ExpertsConfig.model_fields.items() if not field.is_required()}


def experts(
    count: tuple[str, ...],
    width: str,
    *,
    defaults: tuple[int, int, float],
    width_default: int | None = None,
    renormalizes: bool | None = None,
    dense_layers: bool = False,
    shared: bool = False,
    bias: bool = False,
) -> KeyGroup:
    """Return the key group for a mixture of experts.

    Args:
        count: the JSON keys that may have the number of experts; only the first is written.
        width: the JSON key with the width of an expert.
        defaults: the defaults of the number of experts, the experts per token, and the factor of the load-balancing loss.
        width_default: the default of `width`; None if another key group has this JSON key.
        renormalizes: whether the probabilities of the chosen experts are divided by their sum; None if `norm_topk_prob` decides this.
        dense_layers: whether blocks can be without experts, according to `mlp_only_layers` and `decoder_sparse_step`.
        shared: whether a shared MLP with a gate also computes every token.
        bias: whether experts and router have biases.
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
            **{"renormalize": json["norm_topk_prob"] if renormalizes is None else renormalizes, "bias": bias},
            **{"shared_mlp_width": json["shared_expert_intermediate_size"] if shared else None, "shared_gate": shared},
            **{"balance_loss": json["router_aux_loss_coef"] if json["output_router_logits"] else 0.0, "z_loss": 0.0},
        }
        return {"experts": mixture}

    def write(keys: Keys) -> Keys:
        if (mixture := keys["experts"]) is None:
            return {}
        return {
            **{count[0]: mixture["count"], "num_experts_per_tok": mixture["per_token"], width: mixture["mlp_width"]},
            **({"router_aux_loss_coef": mixture["balance_loss"]} if mixture["balance_loss"] else {}),  # readers replace 0 by their default
            "output_router_logits": mixture["balance_loss"] > 0,
            **({"norm_topk_prob": mixture["renormalize"]} if renormalizes is None else {}),
            **(_dense_layers(keys) if dense_layers else {}),
            **({"shared_expert_intermediate_size": mixture["shared_mlp_width"]} if shared else {}),
        }

    return KeyGroup(fields, read, write, {"experts": count[0]})


def corrected_experts(count: int, per_token: int, width: int, groups: tuple[int, int], scale: float, dense: int) -> KeyGroup:
    """Return the key group for the experts of DeepSeek-V3 and GLM-4.5, which a constant of each expert balances. Arguments are defaults."""
    ours = {"per_token": "num_experts_per_tok", "mlp_width": "moe_intermediate_size", "groups": "n_group", "groups_per_token": "topk_group"}
    ours |= {"count": "n_routed_experts", "renormalize": "norm_topk_prob", "scale": "routed_scaling_factor"}
    fields: dict[str, tuple[Any, Any]] = {
        **{"n_routed_experts": (Size, count), "num_experts_per_tok": (Size, per_token), "moe_intermediate_size": (Size, width)},
        **{"n_group": (Size, groups[0]), "topk_group": (Size, groups[1]), "norm_topk_prob": (bool, True)},
        **{"routed_scaling_factor": (Number, scale), "n_shared_experts": (Size, 1)},
        "first_k_dense_replace": (Annotated[int, Field(ge=0)], dense),
        "num_nextn_predict_layers": (Annotated[int, Field(ge=0)], 0),  # layers after the last, which predict further tokens, are not read
    }
    fixed = {"output_router_logits": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    fields |= {key: only(key, value).fields[key] for key, value in fixed.items()}

    def read(json: Keys, keys: Keys) -> Keys:
        layers = shortened([i >= json["first_k_dense_replace"] for i in range(keys["depth"])], keys["depth"])
        shared = json["moe_intermediate_size"] * json["n_shared_experts"]
        further = {"score": "sigmoid", "correction": True, "balance_loss": 0.0, "layers": layers, "shared_mlp_width": shared}
        return {"experts": None if layers == [False] else {**{key: json[theirs] for key, theirs in ours.items()}, **further}}

    def write(keys: Keys) -> Keys:
        if (mixture := keys["experts"]) is None:
            return {"first_k_dense_replace": keys["depth"]}
        return {
            **{theirs: mixture[key] for key, theirs in ours.items()},
            "n_shared_experts": (mixture["shared_mlp_width"] or 0) // mixture["mlp_width"],
            "first_k_dense_replace": expanded(mixture["layers"], keys["depth"]).index(True),
            "num_nextn_predict_layers": 0,
        }

    return KeyGroup(fields, read, write, {"experts": "n_routed_experts"})


def input_weighing_experts() -> KeyGroup:
    """Return the key group for the experts of Llama 4, with inputs that scores multiply, and for the width of the other blocks."""
    fields: dict[str, tuple[Any, Any]] = {
        **{"num_local_experts": (Size, 16), "num_experts_per_tok": (Size, 1), "intermediate_size_mlp": (Size, 16384)},
        **{"moe_layers": (list[Annotated[int, Field(ge=0)]] | None, None), "interleave_moe_layer_step": (Size, 1)},
        **only("output_router_logits", False).fields,
        **only("router_jitter_noise", 0.0).fields,
    }

    def read(json: Keys, keys: Keys) -> Keys:
        step, chosen = json["interleave_moe_layer_step"], json["moe_layers"]
        layers = [(i + 1) % step == 0 if chosen is None else i in chosen for i in range(keys["depth"])]
        mixture = {
            **{"count": json["num_local_experts"], "per_token": json["num_experts_per_tok"], "mlp_width": json["intermediate_size"]},
            **{"score": "sigmoid", "renormalize": False, "weighs_inputs": True, "shared_mlp_width": json["intermediate_size"]},
            **{"balance_loss": 0.0, "layers": layers},
        }
        return {"mlp_width": json["intermediate_size_mlp"], "experts": mixture if any(layers) else None}

    def write(keys: Keys) -> Keys:
        if (mixture := keys["experts"]) is None:
            return {"moe_layers": [], "intermediate_size_mlp": keys["mlp_width"]}
        return {
            **{
                "num_local_experts": mixture["count"],
                "num_experts_per_tok": mixture["per_token"],
                "intermediate_size": mixture["mlp_width"],
            },
            "moe_layers": [i for i, chosen in enumerate(expanded(mixture["layers"], keys["depth"])) if chosen],
            "intermediate_size_mlp": keys["mlp_width"],
        }

    return KeyGroup(fields, read, write, {"experts": "num_local_experts"})


def _layers_with_experts(json: Keys, depth: int) -> Any:
    """Return the value of `layers`, which says for each block whether it has experts."""
    step, dense = json["decoder_sparse_step"], json["mlp_only_layers"] or []
    return shortened([(i + 1) % step == 0 and i not in dense for i in range(depth)], depth)


def _dense_layers(keys: Keys) -> Keys:
    """Return the JSON keys for blocks without experts: a step if every nth block has experts, or a list of the blocks without."""
    layers = shortened(keys["experts"]["layers"], keys["depth"]) or [True]
    if not any(layers[:-1]):
        return {"mlp_only_layers": [], "decoder_sparse_step": len(layers)}
    chosen = expanded(layers, keys["depth"])
    return {"mlp_only_layers": [i for i, has_experts in enumerate(chosen) if not has_experts], "decoder_sparse_step": 1}


def canonical_experts(keys: Keys) -> Keys:
    """Return `experts` and `mlp_width` in a normal form. If all blocks have experts, `mlp_width` has no effect and gets a fixed value."""
    if (mixture := keys["experts"]) is None:
        return {}
    layers = shortened(mixture.get("layers"), keys["depth"])
    return {"experts": {**_DEFAULTS, **mixture, "layers": layers}, **({"mlp_width": mixture["mlp_width"]} if layers is None else {})}


def without_losses(value: Any) -> Any:
    """Return the value of `experts` without the keys that change only the loss."""
    return {key: one for key, one in value.items() if key not in OF_THE_LOSS} if isinstance(value, dict) else value
