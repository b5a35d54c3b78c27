"""The kopf operator: LLMService objects in, pods and live limits out."""
