"""jpipe: pipeline-parallel training for JAX and Flax.

This module exports the names that training needs. Names for tools are in the submodules `plan`, `ops`, `schedules`, `model`, `optimizers`,
`programs`, `meshes`, `stages`, `processes`, `runtime`, `errors`, `checkpoints` and `files`. Each submodule is imported when it is first
used, so plans are lowered and simulated without JAX. `__init__.pyi` lists the names.
"""

import lazy_loader

__version__ = "0.5.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
