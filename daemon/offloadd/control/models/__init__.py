"""Hosted models as the control plane knows them."""
