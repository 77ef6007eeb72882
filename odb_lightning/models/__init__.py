"""Modules to train: any causal language model."""

from odb_lightning.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
