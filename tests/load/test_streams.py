"""Answers are timed as they came, and whatever is not a correct answer is refused."""

import pytest

from loadtest.stream import StreamError, StreamReader


def chunk(text=None, finish=None, usage=None, chat=False):
    content = {"delta": {"content": text}} if chat else {"text": text or ""}
    choices = [] if text is None and finish is None else [{**content, "finish_reason": finish}]
    return {"choices": choices, "usage": usage}


def good(chat=False):
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return [
        chunk("", chat=chat),
        chunk("Once ", chat=chat),
        chunk("upon", chat=chat),
        chunk(" a", finish="length", chat=chat),
        chunk(usage=usage, chat=chat),
    ]


def read(chunks, expected=None):
    """Chunk number i arrives at second 10 + i; the request was sent at 10."""
    reader = StreamReader(begin=10.0)
    for i, each in enumerate(chunks):
        reader.feed(each, 10.0 + i)
    return reader.finish(10.0 + len(chunks), expected)


@pytest.mark.parametrize("chat", [False, True])
def test_text_tokens_and_times_of_a_good_answer(chat):
    answer = read(good(chat), expected=3)
    assert answer.text == "Once upon a"
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 3)
    assert (answer.first, answer.gaps, answer.seconds) == (1.0, (1.0, 1.0), 5.0)
    assert answer.tokens_per_second == 0.6


@pytest.mark.parametrize(
    "chunks, says",
    [
        ([], "finish reason is None"),
        ([chunk("a", finish="abort")], "finish reason is 'abort'"),
        (good()[:-1], "no usage"),
        ([chunk("", finish="length"), good()[-1]], "no text"),
        ([{}], "Not a chunk"),
        (["a"], "Not a chunk"),
    ],
)
def test_wrong_streams_are_refused(chunks, says, refused):
    with refused(StreamError, says):
        read(chunks)


def test_an_answer_of_another_length_is_refused(refused):
    with refused(StreamError, "3 tokens instead of 4"):
        read(good(), expected=4)
