"""The words that guidevane's programs share: the LLMService API, the scheduler limits, the admin contract."""
