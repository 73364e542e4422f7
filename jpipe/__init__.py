"""jpipe: pipeline-parallel training for JAX and Flax.

Here is what training with a pipeline takes, in the order of the data flow. What tools around it need besides is in the submodules
`plan`, `schedules`, `model`, `programs`, `stages`, `processes`, `runtime`, `errors`, `checkpoints` and `files`. Each is imported when
it is first used, so plans are lowered and simulated without JAX. The names are listed in `__init__.pyi`.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
