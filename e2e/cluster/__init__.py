"""A real single-node Kubernetes for the end-to-end tests: ``python -m e2e.cluster up``.

Knows how a node is put together on a Linux machine without Docker, systemd or a registry. Knows nothing of LLM
services: the images' recipes name our packages, the tests own everything that is applied to the cluster.
"""
