"""The facts that every checkpoint of a run has."""

_PLACE = {"batch": 0, "rows": [0], "pieces": 8}
FACTS = {
    **{"config": "train: {}\nplan: {}\n", "plan": "{}", "devices": 1, "val_loss_before": 1.0},
    "history": [{"first": 0, "end": 3, "plan": "gpipe", "optimizer": "adamw", "devices": 1}],
    "data": {"batch_size": 8, "order": _PLACE, "position": _PLACE},
}
