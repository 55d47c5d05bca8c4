"""`antkv diff`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_antkv.cli.options import grouped
from vllm_antkv.cli.tables import JsonInstead, deliver, paragraph, print_table, table

if TYPE_CHECKING:
    from vllm_antkv.evaluate.side_by_side import Comparison

#: Tokens shown of an answer before and after the first that differs.
_AROUND = 12
#: Characters of a token in the table.
_MAX_TOKEN = 14
#: Blocks of the bar that stands for the largest divergence.
_BAR = 12


@dataclass(frozen=True)
class QuestionOptions:
    """What is asked."""

    prompt: Annotated[str, typer.Option(help="A text to continue.")]
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 32
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="Of both servers.")] = None


@grouped
def diff(
    this: Annotated[str, typer.Argument(metavar="URL", help="The server to look at, e.g. http://a:8000.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The server to compare with, usually with auto.")],
    question: QuestionOptions,
    figure: Annotated[Path | None, typer.Option(help="The text, coloured by divergence: a .png or .svg file.")] = None,
    json: JsonInstead = None,
) -> None:
    """Ask two running servers the same prompt: the first token that differs, and how far predictions are apart.

    Example: `antkv diff http://a:8000 http://b:8000 --prompt TEXT`

    The divergence is over the 20 most likely tokens of both and a rest: a lower bound of that over the vocabulary.
    """
    from vllm_antkv.evaluate.heat_map import check_figure
    from vllm_antkv.evaluate.side_by_side import Server, compare_servers
    from vllm_antkv.evaluate.token_strip import write_token_strip

    if figure is not None:
        check_figure(figure)
    mine, theirs = (Server(url, question.api_key) for url in (this, other))
    found = compare_servers(mine, theirs, question.prompt, question.max_tokens)
    if figure is not None:
        write_token_strip(figure, found)
    deliver(found.model_dump(), json, lambda: _show(found))


def _show(found: "Comparison") -> None:
    at = found.first_difference
    if at is None:
        print(f"Both answer with the same {len(found.answers[0])} tokens:")
        paragraph(_visible("".join(found.answers[0])))
    else:
        print(f"The answers are the same for {at} tokens. Where they part:")
        for name, tokens in zip(("this", "other"), found.answers, strict=True):
            before, after = "".join(tokens[max(0, at - _AROUND) : at]), "".join(tokens[at + 1 : at + _AROUND])
            differs = tokens[at] if at < len(tokens) else "(ends)"
            paragraph(f"{name + ':':7}{_visible(before)}>>>{_visible(differs)}<<<{_visible(after)}")
    print("\nThe other's answer; KL from its predictions to this server's, in nats:\n")
    made = table("token", "KL", "", "log p\nthis", "log p\nother", "this one's\nchoice")
    made.columns[2].justify = "left"
    largest = max(token.kl for token in found.tokens)
    for place, token in enumerate(found.tokens):
        mark = ">" if place == at else " "
        bar = "█" * round(_BAR * token.kl / largest) if largest else ""
        choice = "" if token.best[0] == token.token else _short(token.best[0])
        logprobs = (f"{value:.3f}" for value in token.logprobs)
        made.add_row(f"{mark} {_short(token.token)}", f"{token.kl:.5f}", f"{bar:{_BAR}}", *logprobs, choice)
    print_table(made)
    prompt = "" if found.prompt_kl is None else f", of its prompt {found.prompt_kl:.5f}"
    print(f"\nMean KL of the answer {found.answer_kl:.5f}{prompt}.")


def _visible(text: str) -> str:
    """On one line."""
    return text.replace("\n", "\\n")


def _short(token: str) -> str:
    shown = repr(token)[1:-1]
    return f"'{shown if len(shown) <= _MAX_TOKEN else shown[: _MAX_TOKEN - 1] + '…'}'"
