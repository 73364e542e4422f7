"""Host memory: arrays that stay in the memory of the host while no computation needs them (`Plan.offload`)."""
