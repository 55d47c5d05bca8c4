"""Perplexity of an interpolated modified Kneser-Ney trigram on the embedded model's held-out rows.

The yardstick in the model card: same tokenizer, same held-out tokens, counts from the same training rows. Each row
``(ROW_TOKENS,)`` is one sentence, led by two BOS as the network's windows are led by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import embedded_text
import numpy as np
import numpy.typing as npt
import typer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BOS_ID = embedded_text.SPECIAL_TOKENS.index(embedded_text.BOS)
VOCAB = embedded_text.VOCAB_SIZE


@dataclass(frozen=True)
class Order:
    """One order's discounted counts. A gram is an integer, ``context * VOCAB + token``; both arrays below are sorted.

    ``grams`` and ``shares`` ``(num_grams,)`` hold the discounted relative frequency of each seen gram; ``contexts`` and
    ``weights`` ``(num_contexts,)`` the mass that each seen context leaves to the lower order.
    """

    grams: Ints
    shares: Floats
    contexts: Ints
    weights: Floats

    def interpolate(self, grams: Ints, lower: Floats) -> Floats:
        """Probability of each gram's last token ``(n,)``, given the lower order's ``(n,)``."""
        share = lookup(self.grams, self.shares, grams, missing=0.0)
        weight = lookup(self.contexts, self.weights, grams // VOCAB, missing=1.0)
        return share + weight * lower


def lookup(keys: Ints, values: Floats, wanted: Ints, missing: float) -> Floats:
    """Values at the ``wanted`` keys ``(n,)``, or ``missing`` where a key is not among the sorted ``keys``."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], missing)


def make_order(grams: Ints, counts: Ints) -> Order:
    """Discount sorted unique ``grams``, seen ``counts`` times, by modified Kneser-Ney (Chen and Goodman, 1999)."""
    n1, n2, n3, n4 = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    base = n1 / max(1, n1 + 2 * n2)
    estimates = [k - (k + 1) * base * above / max(1, at) for k, at, above in ((1, n1, n2), (2, n2, n3), (3, n3, n4))]
    # An order without enough counts of counts (a tiny corpus, or unigrams that are all frequent) has no such estimate.
    discounts = np.array([min(max(d, 0.1), 0.95 * k) for k, d in enumerate(estimates, start=1)])
    taken = discounts[np.minimum(counts, 3) - 1]
    contexts, first = np.unique(grams // VOCAB, return_index=True)
    totals = np.add.reduceat(counts, first).astype(np.float64)
    sizes = np.diff(np.append(first, len(grams)))
    weights = np.add.reduceat(taken, first) / totals
    return Order(grams, (counts - taken) / np.repeat(totals, sizes), contexts, weights)


class Trigram:
    """Interpolated modified Kneser-Ney over token rows."""

    def __init__(self, rows: npt.NDArray[np.uint16]) -> None:
        """Count ``rows`` ``(num_rows, ROW_TOKENS)``."""
        trigrams, counts = np.unique(trigram_keys(rows), return_counts=True)
        bigrams, bigram_kinds = np.unique(trigrams % VOCAB**2, return_counts=True)  # distinct left neighbours
        unigrams, unigram_kinds = np.unique(bigrams % VOCAB, return_counts=True)
        self.trigrams = make_order(trigrams, counts)
        self.bigrams = make_order(bigrams, bigram_kinds)
        self.unigrams = make_order(unigrams, unigram_kinds)

    def probabilities(self, rows: npt.NDArray[np.uint16]) -> Floats:
        """Probability of every token of ``rows``, flattened."""
        keys = trigram_keys(rows)
        unigram = self.unigrams.interpolate(keys % VOCAB, np.full(len(keys), 1 / VOCAB))
        bigram = self.bigrams.interpolate(keys % VOCAB**2, unigram)
        return self.trigrams.interpolate(keys, bigram)


def trigram_keys(rows: npt.NDArray[np.uint16]) -> Ints:
    """Integer key of the trigram that ends at every token of ``rows`` ``(n, length)``: ``(n * length,)``."""
    padded = np.pad(rows.astype(np.int64), ((0, 0), (2, 0)), constant_values=BOS_ID)
    return ((padded[:, :-2] * VOCAB + padded[:, 1:-1]) * VOCAB + padded[:, 2:]).ravel()


def main(
    cache: Annotated[Path, typer.Option(help="Token cache, as written by `train_embedded.py prepare`.")],
    train_rows: Annotated[int, typer.Option(help="Training rows to count, from the first; 0: all.")] = 0,
    rows: Annotated[int, typer.Option(help="Held-out rows of 2048 tokens, evenly spread.")] = 256,
) -> None:
    """Count the training rows and measure perplexity per token and bits per byte on held-out rows."""
    train = np.load(cache / "train.npy", mmap_mode="r")
    train = train[: train_rows or len(train)]
    val, num_bytes = (embedded_text.spread(np.load(cache / f"{name}.npy"), rows) for name in ("val", "val_bytes"))
    nll = -np.log(Trigram(train).probabilities(val))
    typer.echo(f"trigram on {train.size:,} tokens; held out: {val.size:,} tokens, {num_bytes.sum():,} bytes")
    typer.echo(f"perplexity {math.exp(nll.mean()):.3f}, bits per byte {nll.sum() / math.log(2) / num_bytes.sum():.4f}")


if __name__ == "__main__":
    typer.run(main)
