"""The processes of a run: how they join and communicate, and connections that carry arrays between them. `__init__.pyi` lists the names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
