"""The server process: HTTP, tokenising, streams and metrics. It reaches the engine through one mailbox each way."""
