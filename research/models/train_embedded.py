"""Train the embedded model from plain text, on one CPU core, within a fixed wall-clock budget.

``prepare`` trains the tokenizer and caches token rows, ``train`` trains (and resumes after any interruption),
``evaluate`` measures held-out perplexity, ``export`` writes the transformers model directory. The learning rate and the
context length follow the share of the budget that is used up, so training anneals to its end on time whatever the
machine's throughput.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import embedded_text
import numpy as np
import torch
import typer
from embedded_net import EmbeddedNet, NetConfig
from torch import Tensor
from tqdm import tqdm

BOS_ID = embedded_text.SPECIAL_TOKENS.index(embedded_text.BOS)

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class TrainPlan:
    """Everything that decides the course of a run; ``steps`` replaces the clock when it is positive (tests)."""

    minutes: float
    steps: int = 0
    seed: int = 0
    rows_per_step: int = 4
    short_context: int = 512
    long_context: int = 2048
    long_share: float = 0.28
    warmup_steps: int = 40
    decay_from: float = 0.35
    muon_lr: float = 0.02
    adam_lr: float = 0.002
    weight_decay: float = 0.05

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run that is done, 0 to 1, by steps or by seconds."""
        done = step / self.steps if self.steps else elapsed / (60 * self.minutes)
        return min(done, 1.0)

    def context(self, progress: float) -> int:
        """Window length: short at first (attention is a third of the cost at 512), long in the last part."""
        return self.long_context if progress >= 1 - self.long_share else self.short_context

    def lr_factor(self, step: int, progress: float) -> float:
        """Linear warm-up by steps, a plateau, then a linear fall to 1% at the end of the budget."""
        fall = min(1.0, (1 - progress) / (1 - self.decay_from))
        return min(1.0, (step + 1) / self.warmup_steps) * max(fall, 0.01)


@dataclass
class Clock:
    """Seconds of training over all the restarts of a run; what a kill loses is not counted."""

    before: float
    start: float

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self.before + time.monotonic() - self.start


class Trainer:
    """Network, optimizers and data position: all that a checkpoint holds."""

    def __init__(self, net_config: NetConfig, plan: TrainPlan, rows: np.ndarray, *, compiled: bool) -> None:
        torch.manual_seed(plan.seed)
        self.net = EmbeddedNet(net_config)
        self.plan = plan
        self.rows = rows
        self.step = 0
        self.rows_read = 0
        self.optimizers = make_optimizers(self.net, plan)
        if compiled:
            self.net.compile_parts()

    def next_row(self) -> Tensor:
        """Return the next row ``(ROW_TOKENS,)``; a second pass over the data takes another order, fixed by the seed."""
        epoch, at = divmod(self.rows_read, len(self.rows))
        if epoch:
            at = int(np.random.default_rng((self.plan.seed, epoch)).permutation(len(self.rows))[at])
        self.rows_read += 1
        return torch.from_numpy(self.rows[at].astype(np.int64))

    def train_step(self, progress: float) -> float:
        """Take one optimizer step over ``rows_per_step`` rows; return the mean loss in nats per token."""
        factor = self.plan.lr_factor(self.step, progress)
        total = 0.0
        for _ in range(self.plan.rows_per_step):
            inputs, targets = windows(self.next_row(), self.plan.context(progress))
            loss = self.net(inputs, targets) / self.plan.rows_per_step
            loss.backward()
            total += loss.item()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def save(self, path: Path, elapsed: float) -> None:
        """Write a checkpoint atomically: a kill at any moment leaves the old file or the new one, whole."""
        state = {
            "net_config": asdict(self.net.config),
            "plan": asdict(self.plan),
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "rows_read": self.rows_read,
            "elapsed": elapsed,
        }
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load(self, path: Path) -> float:
        """Restore a checkpoint of the same network; return the seconds trained before it."""
        state = torch.load(path, weights_only=True)
        if state["net_config"] != asdict(self.net.config):
            raise ValueError(f"{path} holds another network, {state['net_config']}: use another --run directory")
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.rows_read = state["step"], state["rows_read"]
        return float(state["elapsed"])


def make_optimizers(net: EmbeddedNet, plan: TrainPlan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (orthogonalised updates learn from fewer tokens), AdamW for embedding and norms."""
    matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in net.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=plan.muon_lr, weight_decay=plan.weight_decay, momentum=0.95)
    adam = torch.optim.AdamW(others, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return [muon, adam]


def windows(row: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut a row ``(ROW_TOKENS,)`` into inputs and targets, both ``(ROW_TOKENS // context, context)``.

    Every window's input starts with the BOS, which so becomes the attention sink that serving also puts there.
    """
    targets = row.view(-1, context)
    bos = torch.full_like(targets[:, :1], BOS_ID)
    return torch.cat((bos, targets[:, :-1]), dim=1), targets


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # an evaluation is over before a forward-only graph would have been compiled
def held_out_nll(net: EmbeddedNet, rows: np.ndarray, context: int) -> Tensor:
    """Return the negative log-likelihood in nats of each token of ``rows`` ``(n, ROW_TOKENS)``, in that shape."""
    losses = []
    for row in rows:
        inputs, targets = windows(torch.from_numpy(row.astype(np.int64)), context)
        log_probs = net.logits(inputs).float().log_softmax(-1)
        losses.append(-log_probs.gather(-1, targets[..., None]).flatten())
    return torch.stack(losses)


def training_loop(trainer: Trainer, run: Path, val: np.ndarray, clock: Clock, every: tuple[float, float]) -> None:
    """Train until the budget is used up; ``every`` is seconds between checkpoints and between held-out evaluations."""
    plan, checkpoint = trainer.plan, run / "checkpoint.pt"
    last_save, last_eval, smooth = clock.elapsed, clock.elapsed, math.nan
    step_tokens = plan.rows_per_step * embedded_text.ROW_TOKENS
    with tqdm(total=plan.steps or round(60 * plan.minutes), unit="step" if plan.steps else "s", smoothing=0.02) as bar:
        while (progress := plan.progress(trainer.step, clock.elapsed)) < 1:
            began = clock.elapsed
            loss = trainer.train_step(progress)
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            now = clock.elapsed
            bar.n = trainer.step if plan.steps else min(round(now), bar.total)
            rate = step_tokens / (now - began)
            bar.set_postfix(step=trainer.step, loss=f"{smooth:.3f}", tok_s=f"{rate:.0f}", ctx=plan.context(progress))
            record = {"step": trainer.step, "elapsed": now, "loss": loss, "progress": progress, "tok_s": rate}
            if now - last_eval >= every[1]:
                record["val_nll"] = (
                    held_out_nll(trainer.net, embedded_text.spread(val, 16), plan.context(progress)).mean().item()
                )
                last_eval = clock.elapsed
            append_json(run / "log.jsonl", record)
            if clock.elapsed - last_save >= every[0]:
                trainer.save(checkpoint, clock.elapsed)
                last_save = clock.elapsed
    trainer.save(checkpoint, clock.elapsed)


def append_json(path: Path, record: dict[str, float]) -> None:
    """Append one line to a JSON-lines log."""
    with path.open("a") as file:
        file.write(json.dumps({key: round(value, 5) for key, value in record.items()}) + "\n")


def load_net(checkpoint: Path) -> tuple[EmbeddedNet, dict[str, Any]]:
    """Load a checkpoint's network, and return the checkpoint too."""
    state = torch.load(checkpoint, weights_only=True)
    net = EmbeddedNet(NetConfig(**state["net_config"]))
    net.load_state_dict(state["net"])
    return net, state


CacheDir = Annotated[Path, typer.Option(help="Directory of the token cache, as written by `prepare`.")]
RunDir = Annotated[Path, typer.Option(help="Directory of the run: checkpoint.pt and log.jsonl.")]
Threads = Annotated[int, typer.Option(help="CPU threads for torch.")]


@app.command()
def prepare(
    books: Annotated[list[Path], typer.Option(help="Text of books, plain or .bz2; repeat for more files.")],
    val: Annotated[Path, typer.Option(help="Held-out books, plain or .bz2.")],
    cache: CacheDir,
    docs: Annotated[list[Path] | None, typer.Option(help="Text of technical documents; repeat for more files.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to cache; take at least what training will read.")] = 30_000_000,
    docs_share: Annotated[float, typer.Option(help="Share of the tokens taken from --docs.")] = 0.10,
    chat_share: Annotated[float, typer.Option(help="Share dressed as user/assistant turns.")] = 0.04,
    seed: Annotated[int, typer.Option(help="Seed of the selection and of the row order.")] = 1234,
) -> None:
    """Train the tokenizer and tokenise a random selection of the text, whose documents end at <|endoftext|> lines."""
    cache.mkdir(parents=True, exist_ok=True)
    sources = embedded_text.Sources(books=books, docs=docs or [], val=val)
    embedded_text.build_cache(sources, embedded_text.Selection(tokens, docs_share, chat_share, seed), cache)


@app.command()
def train(
    cache: CacheDir,
    run: RunDir,
    minutes: Annotated[float, typer.Option(help="Wall-clock budget, over all restarts of the run.")] = 95,
    steps: Annotated[int, typer.Option(help="Schedule by this many steps instead of by the clock.")] = 0,
    threads: Threads = 1,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile: about a third faster, after a minute.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 5,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    intermediate: Annotated[int, typer.Option(help="Feed-forward size.")] = 704,
    heads: Annotated[int, typer.Option(help="Query heads, of size 64.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    rows_per_step: Annotated[int, typer.Option(help="Rows of 2048 tokens per optimizer step.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the initialisation and of later epochs' order.")] = 0,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints; 0: every step.")] = 120,
    eval_seconds: Annotated[float, typer.Option(help="Seconds between held-out evaluations.")] = 600,
) -> None:
    """Train, or go on from the run's checkpoint. Safe to kill at any moment; run the same command again to resume."""
    torch.set_num_threads(threads)
    run.mkdir(parents=True, exist_ok=True)
    shape = NetConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads
    )
    plan = TrainPlan(minutes=minutes, steps=steps, seed=seed, rows_per_step=rows_per_step)
    trainer = Trainer(shape, plan, np.load(cache / "train.npy", mmap_mode="r"), compiled=compiled)
    checkpoint = run / "checkpoint.pt"
    before = trainer.load(checkpoint) if checkpoint.exists() else 0.0
    typer.echo(f"{sum(p.numel() for p in trainer.net.parameters()):,} parameters; starting at step {trainer.step}")
    clock = Clock(before=before, start=time.monotonic())
    val = np.load(cache / "val.npy", mmap_mode="r")
    training_loop(trainer, run, val, clock, (checkpoint_seconds, eval_seconds))


@app.command()
def evaluate(
    cache: CacheDir,
    run: RunDir,
    rows: Annotated[int, typer.Option(help="Held-out rows of 2048 tokens, evenly spread.")] = 256,
    threads: Threads = 1,
) -> None:
    """Measure held-out perplexity per token and bits per byte, at each context length and by position."""
    torch.set_num_threads(threads)
    net, state = load_net(run / "checkpoint.pt")
    net.requires_grad_(False)
    val = embedded_text.spread(np.load(cache / "val.npy", mmap_mode="r"), rows)
    num_bytes = embedded_text.spread(np.load(cache / "val_bytes.npy"), rows).sum()
    typer.echo(
        f"step {state['step']}, {state['rows_read'] * embedded_text.ROW_TOKENS:,} tokens, {state['elapsed']:.0f} s"
    )
    for context in (512, 2048):
        nll = held_out_nll(net, val, context)
        bits = nll.sum().item() / math.log(2) / num_bytes
        typer.echo(f"context {context}: perplexity {nll.mean().exp().item():.3f}, bits per byte {bits:.4f}")
    for start in range(0, embedded_text.ROW_TOKENS, 256):
        typer.echo(
            f"  positions {start}-{start + 255}: perplexity {nll[:, start : start + 256].mean().exp().item():.2f}"
        )


@app.command()
def export(
    cache: CacheDir,
    run: RunDir,
    out: Annotated[Path, typer.Option(help="Model directory to write.")],
) -> None:
    """Write the bf16 transformers model directory, and verify its logits against the training forward."""
    import embedded_export  # transformers' model code takes seconds to import, and training does not need it

    net, _ = load_net(run / "checkpoint.pt")
    difference = embedded_export.export(net, cache / "tokenizer", out)
    typer.echo(f"wrote {out}; largest fp32 logit difference to transformers: {difference:.2e}")


if __name__ == "__main__":
    app()
