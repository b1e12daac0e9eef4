"""Checkpoint folders by global names and shapes, which a mesh of any size can load."""
