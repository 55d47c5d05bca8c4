"""Train the retrieval model: a small Llama that answers the prompts of `research.retrieval` in full precision.

Everything follows from the seed and the number of steps. ``train`` may be killed at any moment, and the same command
goes on from the last checkpoint; ``export`` writes the transformers model directory.
"""

from __future__ import annotations

import random
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import embedded_export
import numpy as np
import torch
import torch.nn.functional as F
import train_embedded
import typer
from embedded_net import EmbeddedNet, NetConfig
from embedded_text import BOS, EOS, PAD, SPECIAL_TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedTokenizerFast

from research.retrieval.prompts import HAYSTACK, pair_lines, passkey_text

CONTEXT = 2048
UNKNOWN = "<|unk|>"
#: Two digits, a word with the space before it, or one other character.
PATTERN = r"\d\d| ?[A-Za-z]+|[^A-Za-z]"
#: Share of the steps -> length of their sequences. Recall is found on short ones, and then only has to be stretched.
LENGTHS = {0.2: 48, 0.45: 256, 0.75: 1024, 1.0: 2048}
TOKENS_PER_STEP = 4096
PASSKEY_SHARE = 0.15
IGNORED = -100

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


def vocabulary() -> dict[str, int]:
    """Token -> id: the special tokens of the embedded model, two-digit numbers, and the words of the passkey text."""
    text, answer = passkey_text(random.Random(0), 2, 0)
    words = sorted(set(re.findall(PATTERN, text + answer + HAYSTACK + ":?")) - {f"{n:02d}" for n in range(100)})
    return {
        token: index
        for index, token in enumerate([*SPECIAL_TOKENS, UNKNOWN, *(f"{n:02d}" for n in range(100)), *words])
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer; what it knows round-trips."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


class Examples:
    """Sequences of the task, each with many questions: what makes recall learnable in minutes."""

    def __init__(self) -> None:
        self.vocab = vocabulary()

    def batch(self, seed: int, step: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both ``(count, length)`` int64; targets are IGNORED where nothing can be predicted."""
        rng = random.Random(f"{seed}/{step}")
        rows = [self._row(rng, length + 1) for _ in range(count)]
        ids = torch.tensor(np.array([row for row, _ in rows]))
        scored = torch.tensor(np.array([mask for _, mask in rows]))
        return ids[:, :-1], ids[:, 1:].masked_fill(~scored[:, 1:], IGNORED)

    def _row(self, rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
        segments = self._passkeys(rng, length) if rng.random() < PASSKEY_SHARE else self._recall(rng, length)
        ids, scored = [0], [False]
        for text, predictable in segments:
            tokens = [self.vocab[token] for token in re.findall(PATTERN, text)]
            ids += tokens
            scored += [predictable] * len(tokens)
        return ids[:length], scored[:length]

    def _recall(self, rng: random.Random, length: int) -> list[tuple[str, bool]]:
        """Facts, then facts again until the sequence is full.

        The key of a repeated line is scored too: its second half follows from the first, and that is learned sooner.
        """
        num_lines = length // 6 + 1
        facts = pair_lines(rng, rng.randrange(2, num_lines))
        segments = [(fact, False) for fact in facts]
        segments += [(fact, True) for fact in rng.choices(facts, k=num_lines - len(facts))]
        return segments

    def _passkeys(self, rng: random.Random, length: int) -> list[tuple[str, bool]]:
        """A text with its fact anywhere, then the question."""
        per_line = len(re.findall(PATTERN, HAYSTACK))
        num_lines = max(1, (length - 10) // per_line)
        text, answer = passkey_text(rng, num_lines, rng.randrange(num_lines))
        padding = HAYSTACK * 2
        return [(text, False), (answer + ".", True), (padding, False)]


def length_of(step: int, steps: int) -> int:
    """Tokens per sequence in this step."""
    return next(length for share, length in LENGTHS.items() if step < share * steps)


@torch.no_grad()
def look_back(net: EmbeddedNet) -> None:
    """Start the first layer with heads that attend to the first, second, third and fourth token before.

    Recall needs them, and finding them takes longer than all the rest. A channel that is the same for every token gives
    keys that are rotated by nothing but their position; a query rotated back by d positions then finds the d-th token
    before, because the cosines of all frequencies agree there alone. Low frequencies would not tell neighbours apart.
    """
    config, layer = net.config, net.model.layers[0]
    half, fast = config.head_size // 2, 8
    angles = config.rope_theta ** (-torch.arange(fast).float() / half)
    constant, strength = 0.3, 0.9
    net.model.embed_tokens.weight[:, 0] = constant
    queries = layer.self_attn.q_proj.weight.view(config.num_heads, config.head_size, -1)
    keys = layer.self_attn.k_proj.weight.view(config.num_kv_heads, config.head_size, -1)
    queries.mul_(0.1)
    keys.mul_(0.1)
    for head in range(config.num_heads):
        phase = -(head + 1) * angles
        queries[head, :fast, 0] = strength * phase.cos()
        queries[head, half : half + fast, 0] = strength * phase.sin()
    keys[:, :fast, 0] = strength


class Trainer:
    """Network, optimizers and step: all that a checkpoint holds."""

    def __init__(self, net_config: NetConfig, plan: train_embedded.TrainPlan) -> None:
        torch.manual_seed(plan.seed)
        self.net = EmbeddedNet(net_config)
        look_back(self.net)
        self.plan = plan
        self.step = 0
        self.examples = Examples()
        self.optimizers = train_embedded.make_optimizers(self.net, plan)

    def train_step(self) -> tuple[float, float]:
        """One optimizer step; the loss in nats per scored token, and the share of these that were the most likely."""
        length = length_of(self.step, self.plan.steps)
        factor = self.plan.lr_factor(self.step, self.plan.progress(self.step, 0))
        inputs, targets = self.examples.batch(self.plan.seed, self.step, TOKENS_PER_STEP // length, length)
        hidden = self.net.model(inputs, torch.bfloat16)
        scored = targets != IGNORED
        logits = F.linear(hidden[scored], self.net.model.embed_tokens.weight.to(hidden.dtype)).float()
        loss = F.cross_entropy(logits, targets[scored])
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item(), (logits.argmax(-1) == targets[scored]).float().mean().item()

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "net_config": asdict(self.net.config),
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def load_net(checkpoint: Path) -> EmbeddedNet:
    """The network of a checkpoint."""
    return train_embedded.load_net(checkpoint)[0]


RunDir = Annotated[Path, typer.Option(help="Folder of the run: checkpoint.pt and, in the end, nothing else.")]


@app.command()
def train(
    run: RunDir,
    steps: Annotated[int, typer.Option(help="Optimizer steps of 4096 tokens.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the initialisation and of the sequences.")] = 0,
) -> None:
    """Train, or go on from the run's checkpoint."""
    torch.set_num_threads(1)
    run.mkdir(parents=True, exist_ok=True)
    config = NetConfig(vocab_size=len(vocabulary()), hidden_size=128, intermediate_size=128, num_layers=2)
    trainer = Trainer(config, train_embedded.TrainPlan(minutes=0, steps=steps, seed=seed))
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    bar = trange(trainer.step, steps, mininterval=10)
    for _ in bar:
        loss, right = trainer.train_step()
        bar.set_postfix(
            loss=f"{loss:.3f}", right=f"{right:.1%}", length=length_of(trainer.step - 1, steps), refresh=False
        )
        if trainer.step % 100 == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


@app.command()
def text(
    out: Annotated[Path, typer.Option(help="File to write.")],
    sequences: Annotated[int, typer.Option(help="Of the model's context.")] = 160,
    seed: Annotated[int, typer.Option(help="Another than in training.")] = 1,
) -> None:
    """Write sequences of the task as plain text, for `antkv calibrate`."""
    inputs, _ = Examples().batch(seed, 0, sequences, CONTEXT)
    out.write_text("\n".join(make_tokenizer().batch_decode(inputs[:, 1:])))


@app.command()
def export(run: RunDir, out: Annotated[Path, typer.Option(help="Model directory to write.")]) -> None:
    """Write the bf16 transformers model directory, and verify its logits against the training forward."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save_pretrained(folder)
        difference = embedded_export.export(load_net(run / "checkpoint.pt"), Path(folder), out)
    typer.echo(f"wrote {out}; largest fp32 logit difference to transformers: {difference:.2e}")


if __name__ == "__main__":
    app()
