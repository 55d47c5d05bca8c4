"""Answers are timed as they came, and whatever is not a correct answer is refused."""

import json

import pytest

from loadtest.stream import StreamError, StreamReader


def chunk(text=None, finish=None, usage=None, chat=False):
    content = {"delta": {"content": text}} if chat else {"text": text or ""}
    choices = [] if text is None and finish is None else [{**content, "finish_reason": finish}]
    return "data: " + json.dumps({"choices": choices, "usage": usage})


def good(chat=False):
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return [
        chunk("", chat=chat),
        chunk("Once ", chat=chat),
        chunk("upon", chat=chat),
        chunk(" a", finish="length", chat=chat),
        chunk(usage=usage, chat=chat),
        "data: [DONE]",
    ]


def read(lines, expected=None):
    """Line number i arrives at second 10 + i; the request was sent at 10."""
    reader = StreamReader(begin=10.0)
    for i, line in enumerate(lines):
        reader.feed(line, 10.0 + i)
        reader.feed("", 10.0 + i)
    return reader.finish(10.0 + len(lines), expected)


@pytest.mark.parametrize("chat", [False, True])
def test_text_tokens_and_times_of_a_good_answer(chat):
    answer = read(good(chat), expected=3)
    assert answer.text == "Once upon a"
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 3)
    assert (answer.first, answer.gaps, answer.seconds) == (1.0, (1.0, 1.0), 6.0)
    assert answer.tokens_per_second == 0.5


def test_comments_keep_a_connection_alive():
    assert read([": ping", *good()]).text == "Once upon a"


@pytest.mark.parametrize(
    "lines, says",
    [
        ([], "without [DONE]"),
        (good()[:-1], "without [DONE]"),
        ([*good(), chunk("more")], "after [DONE]"),
        (["data: [DONE]"], "finish reason"),
        ([chunk("a", finish="abort"), "data: [DONE]"], "finish reason is 'abort'"),
        ([chunk("a", finish="stop"), "data: [DONE]"], "no usage"),
        ([chunk("", finish="length"), *good()[-2:]], "no text"),
        (["<html>"], "Not a line of an event stream"),
        (["data: {"], "Not a chunk"),
        (["data: {}"], "Not a chunk"),
        (['data: {"error": {"message": "out of luck"}}'], "out of luck"),
    ],
)
def test_wrong_streams_are_refused(lines, says, refused):
    with refused(StreamError, says):
        read(lines)


def test_an_answer_of_another_length_is_refused(refused):
    with refused(StreamError, "3 tokens instead of 4"):
        read(good(), expected=4)
