"""Adapters (LoRA) beside a base or fused into derived weights; the base is never rewritten."""
