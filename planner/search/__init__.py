"""The searches: equal pipelines side by side, and PipeDream's stages with replicas of their own."""
