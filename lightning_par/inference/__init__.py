"""Plans by structure: read from a traced forward; tensor styles are proven on single modules."""
