"""The Kubernetes side of a field: list-map keys, quantities, CEL rules, and fields whose behaviour comes later.

A marker is metadata on a pydantic field. It travels in the JSON schema, where the CRD generator, the reference
and `not_in_effect` all read it: one mark, three effects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

JsonObject = dict[str, Any]
"""A decoded JSON object."""

LATER_KEY = "x-guidevane-later"
"""Schema key of a `Later` mark; the CRD generator turns it into text and drops it."""
RULES_KEY = "x-kubernetes-validations"


@dataclass(frozen=True)
class Extra:
    """Adds schema keys beside those that pydantic derives."""

    keys: tuple[tuple[str, Any], ...]

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Merge our keys into the field's own schema."""
        schema = handler(core_schema)
        schema.update(dict(self.keys))
        return schema


class Rule(NamedTuple):
    """One CEL rule of the CRD. The message is static (a computed one can exceed the cost budget)."""

    rule: str
    message: str
    field_path: str = ""
    """Relative path of the field to blame, as in `.limits.maxNumSeqs`; empty: the place that carries the rule."""

    def to_schema(self) -> JsonObject:
        """The rule as the API server reads it."""
        schema = {"rule": self.rule, "message": self.message}
        return {**schema, "fieldPath": self.field_path} if self.field_path else schema


def rules(*found: Rule) -> Extra:
    """CEL rules on one field."""
    return Extra(((RULES_KEY, [rule.to_schema() for rule in found]),))


def model_rules(*found: Rule) -> JsonObject:
    """CEL rules on a whole block, as `json_schema_extra` of its model."""
    return {RULES_KEY: [rule.to_schema() for rule in found]}


def list_map(key: str) -> Extra:
    """A list whose items are known by `key`, so that server-side apply can merge it."""
    return Extra((("x-kubernetes-list-type", "map"), ("x-kubernetes-list-map-keys", [key])))


SET = Extra((("x-kubernetes-list-type", "set"),))
"""A list without an order and without duplicates."""
OPAQUE = Extra((("x-kubernetes-preserve-unknown-fields", True),))
"""An object of core Kubernetes that is passed on as it is; the API server checks it in the child."""


@dataclass(frozen=True)
class Later:
    """A field that is in the schema and has no effect yet: the operator refuses a spec that sets it."""

    what: str
    """What will bring it into effect, as a noun: "canary rollouts"."""
    ready: tuple[str, ...] = ()
    """Values, or beginnings of values, that are in effect already."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Carry the mark in the field's schema."""
        schema = handler(core_schema)
        schema[LATER_KEY] = {"what": self.what, "ready": list(self.ready)}
        return schema

    @classmethod
    def from_schema(cls, schema: JsonObject) -> "Later | None":
        """The mark on this part of the schema, if it has one."""
        mark = schema.get(LATER_KEY)
        return cls(mark["what"], tuple(mark["ready"])) if mark else None

    def sentence(self) -> str:
        """What kubectl explain and the reference say."""
        if self.ready:
            return f"In effect now: {', '.join(self.ready)}; anything else is refused until {self.what} work."
        return f"Not in effect yet: refused while set, until {self.what} work."


def _digits(value: object) -> object:
    """A quantity may come as a bare number, as in `cpu: 4`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
_QUANTITY_KEYS = (("x-kubernetes-int-or-string", True),)
Quantity = Annotated[
    str, BeforeValidator(_digits), Field(max_length=24, pattern=QUANTITY_PATTERN), Extra(_QUANTITY_KEYS)
]
"""A Kubernetes quantity, as in 500m, 4 or 16Gi."""
OptionalQuantity = Annotated[
    str,
    BeforeValidator(_digits),
    Field(max_length=24, pattern=QUANTITY_PATTERN.replace("^", "^$|^", 1)),
    Extra(_QUANTITY_KEYS),
]
"""A quantity, or the empty string for "decide for me"."""

_DNS = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
ObjectName = Annotated[str, Field(max_length=253, pattern=f"^{_DNS}$")]
"""Name of a Kubernetes object."""
OptionalName = Annotated[str, Field(max_length=253, pattern=f"^({_DNS})?$")]
"""Name of a Kubernetes object, or empty."""
Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Word = Annotated[str, Field(max_length=63)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]
Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]
Port = Annotated[int, Field(ge=1024, le=65535)]

Resolver = Callable[[JsonObject], JsonObject]
"""Follows a `$ref`."""
