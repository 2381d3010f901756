"""Builds a CLIP tokenizer in which every word that `shapes` knows is one token."""

from __future__ import annotations

from itertools import pairwise

from transformers import CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shapes_training.words import WORDS

MAX_TOKENS = 16
_WORD_END = "</w>"

Merge = tuple[str, str]


def build_tokenizer() -> CLIPTokenizer:
    merges = word_merges(WORDS)
    letters = list(bytes_to_unicode().values())
    symbols = letters + [letter + _WORD_END for letter in letters]
    symbols += ["".join(merge) for merge in merges]
    symbols += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def word_merges(words: tuple[str, ...]) -> list[Merge]:
    """Merges, in order of rank, that make one token of each word.

    Each word is first split by the merges so far, then what is left of it is joined from the left.
    Later merges have a lower rank than those that complete an earlier word, so they cannot undo it.
    """
    merges: list[Merge] = []
    for word in words:
        parts = _split(word, merges)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    return merges


def _split(word: str, merges: list[Merge]) -> list[str]:
    parts = [*word[:-1], word[-1] + _WORD_END]
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    while True:
        pairs = [pair for pair in pairwise(parts) if pair in ranks]
        if not pairs:
            return parts
        parts = _join(parts, min(pairs, key=ranks.__getitem__))


def _join(parts: list[str], pair: Merge) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined
