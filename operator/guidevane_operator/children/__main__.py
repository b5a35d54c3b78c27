"""Print what the operator would apply: python -m guidevane_operator.children service.yaml"""

import argparse
import sys
from collections.abc import Sequence
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
    service = yaml.safe_load(text)
    if not isinstance(service, dict) or not {"metadata", "spec"} <= set(service):
        raise ValueError("this is no LLMService: it has no metadata or no spec")
    return yaml.safe_dump_all(render(context_of(service)), sort_keys=False, width=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the operator would apply for an LLMService. Exit status 1 for one that it would refuse."""
    parser = argparse.ArgumentParser(prog="python -m guidevane_operator.children", description=main.__doc__)
    parser.add_argument("service", type=Path, help="YAML of an LLMService")
    path = parser.parse_args(arguments).service
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{path} can't be read: {error}")
    try:
        sys.stdout.write(render_text(text))
    except (ValueError, yaml.YAMLError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
