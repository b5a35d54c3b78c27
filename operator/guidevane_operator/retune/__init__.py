"""The slow loop over the live limits: a pure `decide`, and a thin executor that carries its decisions out."""
