"""Check jpipe on one NVIDIA GPU: `make check-gpu`."""
