"""The child objects of a service, rendered by pure functions: the same input gives the same manifests, always."""

from guidevane_operator.children.context import RenderContext
from guidevane_operator.children.render import PDB_KIND, render, revision_of, wants_pdb

__all__ = ["PDB_KIND", "RenderContext", "render", "revision_of", "wants_pdb"]
