"""Text forms of plans: JSON, and one line for terminals."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from jpipe.capabilities.registry import OPTIONS
from jpipe.errors import InputError, short, shortened
from jpipe.plan._stage import Stage

if TYPE_CHECKING:
    import jpipe

FORMAT = "jpipe-plan/1"


def text_of_plan(plan: "jpipe.Plan") -> str:
    """Return the plan in one line, as `print` shows it."""
    stages = shortened([f"[{shortened(s.layers)}]{_mesh_text(s)}{_replicas_text(s)}" for s in plan.stages])
    hidden = {"placement", "predicted", "order", "rules", "param_axes"}
    special = [(name, f) for name, f in type(plan).model_fields.items() if name not in hidden and not f.is_required()]
    options = "".join(f", {name}={getattr(plan, name)!r}" for name, field in special if getattr(plan, name) != field.default)
    return f"Plan({plan.schedule}, {plan.microbatches} microbatches, {plan.depth} stages: {stages}{options})"


def _replicas_text(stage: Stage) -> str:
    """Return a short text of the replicas of a stage and their options; empty for one replica."""
    options = "".join(option.text(stage) for option in OPTIONS if option.text is not None)
    return f" × {stage.replicas}{options}" if stage.replicas > 1 else ""


def _mesh_text(stage: Stage) -> str:
    """Return a short text of the mesh of a stage, after a space; empty without a mesh."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in stage.mesh.items())
    return f" on ({sizes}{', fsdp' if stage.fsdp else ''})" if stage.mesh else ""


def read_json(text: str | bytes, expected: str, where: str) -> dict[str, Any]:
    """Read a JSON object with the expected value of the key `format`.

    Args:
        text: JSON text from any source. A key that occurs twice gets a value that no field accepts.
        expected: the format, such as "jpipe-plan/1".
        where: the name of the source, such as a file, for error messages.

    Raises:
        InputError: the text is not JSON (the message has line and column), not a JSON object, or has another format.
    """
    kind = expected.removeprefix("jpipe-").partition("/")[0]
    if not isinstance(text, (str, bytes, bytearray)):
        raise InputError(where=where, expected=f"a {kind} as JSON text", found=type(text).__name__)
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: expected a {kind} as JSON, found text that is not JSON or is cut off "
            f"at line {error.lineno}, column {error.colno} ({error.msg})"
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            f"{where}: expected a {kind} as JSON, found bytes that are not UTF-8 text; give the text that to_json returned"
        ) from None
    except (RecursionError, ValueError):
        raise InputError(f"{where}: expected a {kind} as JSON, found text nested too deeply, or a number of thousands of digits") from None
    if not isinstance(data, dict) or data.get("format") != expected:
        actual = short(data.get("format") if isinstance(data, dict) else type(data).__name__)
        raise InputError(f'{where}: expected a JSON object with "format": "{expected}", found {actual}; is this a {kind} of jpipe?')
    return data


class _Twice:
    """The value of a key that occurs twice. No field accepts this value, so an error names the key."""

    def __repr__(self) -> str:
        return "the key twice"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; `json` itself silently takes the last value of a key that occurs twice."""
    counts = Counter(key for key, _ in pairs)
    return {key: value if counts[key] == 1 else _Twice() for key, value in pairs}
