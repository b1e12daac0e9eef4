"""Predicting a configured run: its settings, layouts and picture; and trying layouts."""
