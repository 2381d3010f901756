"""The checkpoint index: what lies where in a model's files, checked, without torch."""

from offloadd.store.index.checkpoint import CheckpointIndex, TensorPlace, read_checkpoint
from offloadd.store.index.hub_cache import find_source
from offloadd.store.index.identity import FileIdentity
from offloadd.store.index.pipeline import ComponentFiles, PipelineFiles, inspect_pipeline
from offloadd.store.index.weight_file import IndexedFile

__all__ = [
    "CheckpointIndex",
    "ComponentFiles",
    "FileIdentity",
    "IndexedFile",
    "PipelineFiles",
    "TensorPlace",
    "find_source",
    "inspect_pipeline",
    "read_checkpoint",
]
