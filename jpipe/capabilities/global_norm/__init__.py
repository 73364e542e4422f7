"""Global norm: updates that know the gradients of all stages, to clip them, to skip batches, and for a dynamic loss scale."""
