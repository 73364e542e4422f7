"""Logs of a run in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, trackio and MLflow."""
