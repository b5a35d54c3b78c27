"""The Kubernetes side of a field: list-map keys, quantities, CEL rules, and fields whose behaviour comes later.

A marker is metadata on a pydantic field. It travels in the JSON schema, where the CRD generator, the reference
and `not_in_effect` all read it: one mark, three effects.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

JsonObject = dict[str, Any]
"""A decoded JSON object."""

LATER_KEY = "x-guidevane-later"
"""Schema key of a `Later` mark; the CRD generator turns it into text and drops it."""
EFFECT_KEY = "x-guidevane-effect"
"""Schema key of a sentence that says when a change to this block takes effect; it is added to each of its fields."""
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


ROLLOUT = Extra(((EFFECT_KEY, "Takes a rollout."),))
"""A block from which pods are made."""
LIVE = Extra(((EFFECT_KEY, "Live."),))
"""A block that running pods, or the operator, follow."""
TERSE_KEY = "x-guidevane-terse"
TERSE = Extra(((TERSE_KEY, True),))
"""A block whose fields are described elsewhere."""
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
            verb = "works" if len(self.ready) == 1 else "work"
            return f"Only {' and '.join(self.ready)} {verb} yet: others are refused."
        return "Not in effect yet: refused."

    def refusal(self) -> str:
        """What the condition SpecAccepted says after the field's path."""
        way_out = f"use {' or '.join(self.ready)}" if self.ready else "remove it"
        return f"not in effect yet ({self.what}); {way_out}"


def _digits(value: object) -> object:
    """A quantity may come as a bare number, as in `cpu: 4`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
_QUANTITY_KEYS = (("x-kubernetes-int-or-string", True),)
Quantity = Annotated[
    str, Field(max_length=24, pattern=QUANTITY_PATTERN), BeforeValidator(_digits), Extra(_QUANTITY_KEYS)
]
"""A Kubernetes quantity, as in 500m, 4 or 16Gi."""
OptionalQuantity = Annotated[
    str,
    Field(max_length=24, pattern=QUANTITY_PATTERN.replace("^", "^$|^", 1)),
    BeforeValidator(_digits),
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


def inlined(document: JsonObject) -> JsonObject:
    """A pydantic JSON schema without `$ref`, and with `X or null` as plain X: absence is how the API says null."""
    definitions = document.get("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        beside = {key: value for key, value in node.items() if key not in ("$ref", "$defs", "anyOf", "allOf")}
        base: JsonObject = {}
        if "$ref" in node:
            base = resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
        for choice in (*node.get("anyOf", ()), *node.get("allOf", ())):
            if choice != {"type": "null"}:
                assert not base, f"the API has no unions: {node}"
                base = resolve(choice)
        merged = {**base, **{key: resolve(value) for key, value in beside.items()}}
        if RULES_KEY in base and RULES_KEY in beside:
            merged[RULES_KEY] = [*base[RULES_KEY], *beside[RULES_KEY]]
        return merged

    resolved: JsonObject = resolve(document)
    return resolved


def default_sentence(node: JsonObject) -> str:
    """The default in words, unless it is empty or a block."""
    default = node.get("default")
    if default in (None, "", []) or isinstance(default, dict):
        return ""
    return f"Default {render(default)}."


def render(value: Any) -> str:
    """A default as one writes it in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def find_later(schema: JsonObject, value: Any, path: str, later: Later | None = None) -> list[tuple[str, str]]:
    """Walk a value beside its schema and list what is marked as Later and differs from its default."""
    later = Later.from_schema(schema) or later
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        return [
            found
            for name, inner in value.items()
            if name in fields
            for found in find_later(fields[name], inner, f"{path}.{name}", later)
        ]
    if later and not _asks_for_nothing(schema, value, later):
        return [(path, later.refusal())]
    if isinstance(value, list) and "items" in schema and not later:
        return [
            found for index, item in enumerate(value) for found in find_later(schema["items"], item, f"{path}[{index}]")
        ]
    return []


def _asks_for_nothing(schema: JsonObject, value: Any, later: Later) -> bool:
    """Whether a value is the default, empty, or in effect already."""
    if value in (None, "", [], {}) or value == schema.get("default"):
        return True
    items = value if isinstance(value, list) else [value]
    return bool(later.ready) and all(isinstance(item, str) and item.startswith(later.ready) for item in items)
