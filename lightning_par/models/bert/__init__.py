"""The reference BERT."""
