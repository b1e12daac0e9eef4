"""The reference GPT."""
