"""Predicts and rehearses training on machines that are not here, and searches layouts."""
