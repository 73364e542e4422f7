"""Optional capabilities of pipelines, each in a folder of its own; `protocol` says what one consists of, `registry` lists them.

A capability can be read, tested, replaced and removed by itself: remove its folder and its lines of `registry`. The core names none.
"""
