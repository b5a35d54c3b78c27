"""Requests that come in: from recorded traces, or from generators with a seed."""
