"""Global norm: updates know the gradients of all stages, in order to clip them, skip batches or adapt the loss scale."""
