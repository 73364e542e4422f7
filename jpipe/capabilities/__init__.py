"""Optional capabilities of pipelines, each in its own folder. `protocol` describes their hooks, and `registry` lists the capabilities.

A capability can be read, tested, replaced and removed on its own. To remove one, remove its folder and its lines in `registry`: the core
names no capability.
"""
