"""The engine process: model, KV cache and the loop that runs the scheduler's plans."""
