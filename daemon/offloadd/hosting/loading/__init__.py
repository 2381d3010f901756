"""Modules without weights, and where their weights are to be had."""
