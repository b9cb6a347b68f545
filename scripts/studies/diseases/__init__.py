"""Runs that are ill on purpose, and healthy ones, in three settings: what `skyrl-doctor` is measured on."""
