"""Verifier of structured answers: JSON that fits a schema and, where given, equals a reference.

Does not know text outside the JSON. Source: own; checks by JSON Schema 2020-12 without coercion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.json_schema import check_schema, field_errors, json_equal, schema_errors
from tfgrpo.runtime.json_text import shape_match
from tfgrpo.verifiers.answer import UnitVerifier, find_json, short

__all__ = ["JsonSchema"]


class JsonSchema(UnitVerifier):
    """1 for a right JSON answer, with partial credit by top-level fields.

    A field is right when it breaks no rule of the schema and equals the reference's field. The
    reward is the share of right fields among all that are expected or given, so that a surplus
    field costs as much as a missing one. Without a reference (None) the fields expected are the
    required ones. Answers or references that are no objects are right or wrong as a whole.

    Args:
        schema: JSON Schema of the answer; None checks against the reference alone.
        partial: give the share; else 1 only where everything is right.
    """

    def __init__(self, schema: Mapping[str, Any] | None = None, *, partial: bool = True) -> None:
        if schema is not None:
            check_schema(schema, "JsonSchema: schema")
        self._schema = schema
        self._partial = partial
        super().__init__("json_schema", [schema, partial])

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for a reference that its own schema refuses, or where both lack."""
        where = f"task {task.task_id!r}: the reference"
        if task.reference is None:
            if self._schema is None:
                raise ConfigError(f"{where} is missing and JsonSchema has no schema: give one")
            return
        if self._schema is not None:
            errors = schema_errors(self._schema, task.reference)
            if errors:
                raise ConfigError(f"{where} breaks the schema at {errors[0][0]}: {errors[0][1]}")

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Parse and compare; asks nobody."""
        try:
            value = find_json(rollout.answer, lambda v: self._fit(v, task.reference))
        except ValueError as exc:
            return Score(0.0, f"the answer is not JSON: {exc}", {"parsed": 0.0, "valid": 0.0})
        errors = field_errors(self._schema, value) if self._schema is not None else []
        wrong = _wrong_fields(value, errors, task.reference)
        fields = self._fields(value, task.reference)
        if fields and isinstance(value, dict) and "" not in wrong:
            share = sum(name not in wrong for name in fields) / len(fields)
        else:
            share = float(not wrong)
        parts = {"parsed": 1.0, "valid": float(not errors), "fields": share}
        reasons = [f"{name}: {why}" if name else why for name, why in sorted(wrong.items())]
        reward = share if self._partial else float(not wrong)
        return Score(reward, "; ".join(reasons) or "every field is right", parts)

    def _fit(self, value: Any, reference: Any) -> float:
        """Return how far a value has the shape asked for; any value fits a little."""
        fit = 0.01
        if reference is not None:
            fit += shape_match(value, reference)
        if self._schema is not None:
            errors = schema_errors(self._schema, value)
            fit += 1.0 / (1 + len(errors))
            if any(path == "$" and "is not of type" in said for path, said in errors):
                fit /= 100  # another kind of value
        return fit

    def _fields(self, value: Any, reference: Any) -> set[str]:
        given = set(value) if isinstance(value, dict) else set()
        if isinstance(reference, Mapping):
            return given | set(reference)
        return given | set((self._schema or {}).get("required", ()))


def _wrong_fields(value: Any, errors: list[tuple[str, str]], reference: Any) -> dict[str, str]:
    """Return field name to reason; the empty name stands for the value as a whole."""
    wrong: dict[str, str] = {}
    for name, why in errors:
        wrong.setdefault(name, why)
    if reference is None:
        return wrong
    if not (isinstance(reference, Mapping) and isinstance(value, dict)):
        if not json_equal(value, reference):
            wrong.setdefault("", f"the value is {short(value)}, expected {short(reference)}")
        return wrong
    for name in reference.keys() - value.keys():
        wrong[name] = f"missing, expected {short(reference[name])}"
    for name in value.keys() - reference.keys():
        wrong.setdefault(name, "not expected")
    for name in reference.keys() & value.keys():
        if not json_equal(value[name], reference[name]):
            said = f"{short(value[name])}, expected {short(reference[name])}"
            wrong[name] = f"{said} ({wrong[name]})" if name in wrong else said
    return wrong
