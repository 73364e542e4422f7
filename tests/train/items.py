"""The program of the two processes in test_checkpoint_files.py: `python -m tests.train.items ADDRESS INDEX FOLDER`."""

import sys
import threading
import time
from pathlib import Path

STEP = 40


def layers_of(process: int) -> dict:
    """Return layers whose names and numbers differ between processes."""
    import jax.numpy as jnp

    return {f"layer {process}": {"weights": {"w": jnp.arange(6.0).reshape(2, 3) + process}, "count": jnp.int32(process)}}


def main(address: str, index: int, folder: Path) -> None:
    """Write what is this process's, process 1 when process 0 is done; read all, each process for itself."""
    import jax
    import numpy as np

    from jpipe.checkpoints import Checkpoint, steps
    from jpipe.checkpoints.writing import await_parts, complete, write_layers

    jax.distributed.initialize(address, num_processes=2, process_id=index)
    assert jax.process_count() == 2
    if index == 1:
        while not (folder / "0 has written").exists():
            time.sleep(0.01)
    writing = threading.Thread(target=write_layers, args=(folder, STEP, layers_of(index), index))
    writing.start()
    writing.join()
    (folder / f"{index} has written").touch()
    if index == 0:
        await_parts(folder, STEP, range(2), limit=30.0)
        complete(folder, STEP, processes=2, facts={})
    while steps(folder) != [STEP]:
        time.sleep(0.01)
    layers = Checkpoint(folder, STEP).read()
    assert set(layers) == {"layer 0", "layer 1"}
    np.savez(folder / f"{index}.npz", **{f"{layer} w": tree["weights"]["w"] for layer, tree in layers.items()})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
