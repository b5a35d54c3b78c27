"""Print what the operator would apply: python -m guidevane_operator.children service.yaml"""

import sys
from pathlib import Path

import yaml

from guidevane_operator import acceptance
from guidevane_operator.children import RenderContext, render
from guidevane_operator.kube import Manifest, ServiceKey
from guidevane_operator.settings import Settings
from guidevane_operator.tenants import plan_tenants

STAND_IN = "the-real-token-is-random"


def context_of(service: Manifest) -> RenderContext:
    """What rendering looks at, for an object that is in no cluster yet. Raises ValueError if it would be refused."""
    verdict = acceptance.accept(service["spec"])
    if isinstance(verdict, acceptance.Refused):
        raise ValueError(verdict.message)
    meta = service["metadata"]
    return RenderContext(
        key=ServiceKey(meta.get("namespace", "default"), meta["name"]),
        uid=meta.get("uid", "00000000-0000-0000-0000-000000000000"),
        spec=verdict.spec,
        runtime_image=str(Settings.model_fields["runtime_image"].default),
        token=STAND_IN,
        tenants=plan_tenants(verdict.spec.tenancy, {}).file,  # no Secret can be read here
    )


def render_text(text: str) -> str:
    """YAML of an LLMService in, YAML of its children out."""
    return yaml.safe_dump_all(render(context_of(yaml.safe_load(text))), sort_keys=False, width=120)


def main() -> int:
    """Exit status 1 for a service that the operator would refuse."""
    if len(sys.argv) != 2:
        print("usage: python -m guidevane_operator.children service.yaml", file=sys.stderr)
        return 2
    try:
        sys.stdout.write(render_text(Path(sys.argv[1]).read_text()))
    except ValueError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
