"""The layers that the capabilities of a plan add to a model."""

from jpipe.capabilities.registry import runtimes_of
from jpipe.model._stack import LayerStack
from jpipe.plan import Plan


def with_added_layers(stack: LayerStack, plan: Plan) -> tuple[LayerStack, Plan]:
    """Return a model and a plan with the layers that the plan's capabilities add to the model. If they have them, both are unchanged.

    Args:
        stack: the model.
        plan: a plan for the model, with or without these layers.

    Raises:
        InputError: the model cannot have these layers.
    """
    for hooks in runtimes_of(plan):
        if hooks.added_layers is not None:
            stack, plan = hooks.added_layers(stack, plan)
    return stack, plan
