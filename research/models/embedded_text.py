"""Tokenizer and token cache of the embedded model: text files in, rows of token ids out.

The cache is one ``(num_rows, ROW_TOKENS)`` uint16 array. A row is 2048 consecutive tokens of one source, without a BOS:
the trainer puts the BOS in front of every window that it cuts out of a row. Rows are shuffled once, here, so that the
trainer reads them in order and its data position is a single integer.
"""

from __future__ import annotations

import bz2
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END]  # ids 0 .. 6, in this order

VOCAB_SIZE = 4096
ROW_TOKENS = 2048
PIECE_CHARS = 32_000  # about 9,000 tokens: four full rows, and small enough that a shuffle mixes all the books
BPE_CHARS = 15_000_000  # that the vocabulary is learned from
CHARS_PER_TOKEN = 3.4  # measured for this vocabulary on books; only sizes the selection

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Rows = npt.NDArray[np.uint16]


def read_text(path: Path) -> str:
    """Return a text file's content; ``.bz2`` files are decompressed."""
    raw = path.read_bytes()
    return (bz2.decompress(raw) if path.suffix == ".bz2" else raw).decode("utf-8")


def split_documents(text: str) -> list[str]:
    """Split a corpus file at its ``<|endoftext|>`` lines."""
    return [doc.strip() for doc in text.split(EOS) if doc.strip()]


def cut_pieces(document: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cut a document into pieces of about ``piece_chars``, at paragraph ends; only its true end carries the EOS."""
    start = 0
    while start < len(document):
        stop = start + piece_chars
        if stop >= len(document):
            yield document[start:] + EOS
            return
        paragraph_end = document.rfind("\n\n", start, stop)
        stop = paragraph_end + 2 if paragraph_end > start + piece_chars // 2 else stop
        yield document[start:stop]
        start = stop


def dialogue_turns(piece: str) -> Iterator[list[str]]:
    """Yield runs of neighbouring paragraphs to be dressed as user/assistant turns.

    Quoted speech makes runs of up to six turns; a narrative paragraph and its continuation make a pair. This teaches
    the model what the role markers look like, not how to follow instructions.
    """
    paragraphs = [re.sub(r"\s*\n\s*", " ", p).strip() for p in piece.split("\n\n")]
    paragraphs = [p for p in paragraphs if 2 < len(p) < 1200 and EOS not in p]
    run: list[str] = []
    for paragraph in paragraphs:
        if run and (is_speech(paragraph) != is_speech(run[0]) or len(run) == 6):
            yield from [run[: len(run) // 2 * 2]] if len(run) > 1 else []
            run = []
        run.append(paragraph)
        if not is_speech(paragraph) and len(run) == 2:
            yield run
            run = []


def is_speech(paragraph: str) -> bool:
    """Say whether a paragraph opens with a quotation mark."""
    return paragraph.startswith(('"', "'", "\u201c", "\u2018"))


def as_chat(turns: list[str]) -> str:
    """Render turns exactly as the chat template does (without the BOS), closed by the EOS."""
    roles = (USER, ASSISTANT)
    return "".join(f"{roles[i % 2]}{turn}{END}" for i, turn in enumerate(turns)) + EOS


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE and wrap it for transformers, with BOS prepended and the chat template attached."""
    from transformers import PreTrainedTokenizerFast  # it takes seconds to import, and training does not need it

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has a token: any text round-trips
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=ROW_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def encode_rows(tokenizer: Tokenizer, texts: list[str], *, packed: bool) -> Rows:
    """Tokenise ``texts`` into ``(num_rows, ROW_TOKENS)``.

    ``packed`` joins short texts end to end (their EOS separates them). Otherwise rows never cross texts, and are cut
    from each text's end, so that a book's last row keeps its EOS and the remainder is dropped at the front.
    """
    encoded = [
        np.asarray(e.ids, dtype=np.uint16)
        for at in range(0, len(texts), 256)
        for e in tokenizer.encode_batch(texts[at : at + 256], add_special_tokens=False)
    ]
    runs = [np.concatenate(encoded)] if packed and encoded else encoded
    rows = [run[len(run) % ROW_TOKENS :].reshape(-1, ROW_TOKENS) for run in runs]
    return np.concatenate([*rows, np.empty((0, ROW_TOKENS), np.uint16)])


def take_chars(texts: Iterable[str], chars: int) -> list[str]:
    """Take texts from an iterator until they hold at least ``chars`` characters."""
    taken: list[str] = []
    total = 0
    for text in texts:
        if total >= chars:
            break
        taken.append(text)
        total += len(text)
    return taken


@dataclass(frozen=True)
class Sources:
    """Files of text: books and technical documents to learn from, and held-out books."""

    books: list[Path]
    docs: list[Path]
    val: Path


@dataclass(frozen=True)
class Selection:
    """What is drawn: ``tokens`` in all, the shares of them from documents and dressed as chats, and the seed."""

    tokens: int
    docs_share: float
    chat_share: float
    seed: int


def build_cache(sources: Sources, selection: Selection, cache: Path) -> None:
    """Train the tokenizer and write ``tokenizer/``, ``train.npy`` and ``val.npy`` under ``cache``.

    ``val.npy`` holds every full row of the held-out books in reading order; ``val_bytes.npy`` the UTF-8 bytes per row,
    for bits per byte.
    """
    rng = random.Random(selection.seed)
    pieces = [p for f in sources.books for doc in split_documents(read_text(f)) for p in cut_pieces(doc)]
    rng.shuffle(pieces)
    docs = [p for f in sources.docs for doc in split_documents(read_text(f)) for p in cut_pieces(doc)]
    rng.shuffle(docs)
    chars = int(selection.tokens * CHARS_PER_TOKEN)
    books = take_chars(pieces, int(chars * (1 - selection.docs_share - selection.chat_share)))
    chat_pieces = pieces[len(books) :]  # other pieces than the plain ones, so no text is seen twice
    chats = take_chars((as_chat(t) for p in chat_pieces for t in dialogue_turns(p)), int(chars * selection.chat_share))
    docs = take_chars(docs, int(chars * selection.docs_share))

    sample = take_chars(iter(books), int(BPE_CHARS * 0.88)) + take_chars(iter(docs), int(BPE_CHARS * 0.12))
    wrapped = train_tokenizer(text.replace(EOS, "") for text in sample)
    wrapped.save_pretrained(cache / "tokenizer")
    tokenizer = wrapped.backend_tokenizer

    parts = [encode_rows(tokenizer, t, packed=p) for t, p in ((books, False), (docs, True), (chats, True))]
    rows = np.concatenate(parts)
    np.random.default_rng(selection.seed).shuffle(rows, axis=0)
    np.save(cache / "train.npy", rows)
    save_validation(tokenizer, split_documents(read_text(sources.val)), cache)
    print(f"rows: books {len(parts[0])}, docs {len(parts[1])}, chats {len(parts[2])}: {rows.size / 1e6:.1f} M tokens")


def save_validation(tokenizer: Tokenizer, documents: list[str], cache: Path) -> None:
    """Write the held-out rows ``(num_rows, ROW_TOKENS)`` and their byte counts ``(num_rows,)``."""
    rows = encode_rows(tokenizer, documents, packed=False)
    num_bytes = [len(tokenizer.decode(row.tolist()).encode("utf-8")) for row in rows]
    np.save(cache / "val.npy", rows)
    np.save(cache / "val_bytes.npy", np.asarray(num_bytes, dtype=np.int64))


def spread(rows: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Pick ``count`` of the ``rows`` ``(n, ...)``, evenly spread over all; all of them if there are not that many."""
    picked: npt.NDArray[Any] = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
    return picked
