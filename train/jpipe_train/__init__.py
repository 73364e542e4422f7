"""The application: train a language model, or your own model, through a pipeline. A run is described in a YAML file or in Python.

`jpipe_train.fit` trains a `jpipe.Pipeline` that a Python program has built, with the loop, evaluation, checkpoints, logs and report of
`jpipe train`. Every name is imported when it is first used; `__init__.pyi` lists the names. `jpipe` never imports this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
