"""guidevane's runtime: an OpenAI-compatible server over an engine that schedules at every iteration."""
