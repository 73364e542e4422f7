"""Host memory: what a plan lets wait in the memory of the host while no computation needs it (`Plan.offload`)."""
