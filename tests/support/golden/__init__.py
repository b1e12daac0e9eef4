"""Records of what the package decides, to show that a change of its structure changed nothing."""
