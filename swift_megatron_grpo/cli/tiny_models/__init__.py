"""Tiny random models for check-script, for scripts/make_tiny_*.py and for tests.

text.py        configs of text models, and a byte-level tokenizer for all models
composites.py  models with an image part or linear attention
by_type.py     a model, or only the config.json of a large one, by the type that transformers gives it
"""
