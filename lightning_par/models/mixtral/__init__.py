"""The reference Mixtral: a decoder with experts."""
