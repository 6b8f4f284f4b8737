"""Routes that vLLM adds to OpenAI's."""
