"""The divergence of the most likely tokens bounds that of the whole vocabulary from below."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.evaluate.fidelity import TOP_TOKENS, TopTokens, divergence, top1_agreement

POSITIONS = 6


def random_logprobs(seed: int, vocab: int, sharpness: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(POSITIONS, vocab, generator=generator, dtype=torch.float64)).log_softmax(-1)


def listed(logprobs: torch.Tensor, length: int = TOP_TOKENS) -> TopTokens:
    """As vLLM lists them: the most likely tokens of each position, in any order."""
    best, ids = logprobs.topk(min(length, logprobs.shape[1]))
    return TopTokens.of(
        [dict(zip(i.tolist(), b.tolist(), strict=True)) for i, b in zip(ids.flip(-1), best.flip(-1), strict=True)]
    )


seeds = st.integers(0, 10_000)


@given(seed=seeds, vocab=st.integers(TOP_TOKENS + 1, 200), sharpness=st.floats(0.1, 6), noise=st.floats(0, 3))
def test_it_is_a_lower_bound(seed, vocab, sharpness, noise):
    p = random_logprobs(seed, vocab, sharpness)
    q = (p + noise * random_logprobs(seed + 1, vocab, 1.0)).log_softmax(-1)
    full = (p.exp() * (p - q)).sum(-1)
    found = divergence(listed(p), listed(q))
    assert (found >= 0).all()
    assert (found <= full + 1e-6).all()


@given(seed=seeds, sharpness=st.floats(0.1, 3))
def test_it_is_exact_when_the_lists_hold_every_token(seed, sharpness):
    p, q = (random_logprobs(seed + at, TOP_TOKENS, sharpness) for at in range(2))
    torch.testing.assert_close(divergence(listed(p), listed(q)), (p.exp() * (p - q)).sum(-1), atol=1e-6, rtol=1e-6)


def test_agreement_is_the_share_of_equal_first_tokens():
    p = random_logprobs(0, 50, 2.0)
    q = p.clone()
    q[0, p[0].argmin()] = 0.0
    assert top1_agreement(listed(p), listed(q)) == (POSITIONS - 1) / POSITIONS


def test_a_token_beyond_the_list_is_left_out():
    """vLLM adds the prompt's own token to the list when it is not among the most likely."""
    p = random_logprobs(0, 100, 2.0)
    assert torch.equal(listed(p, TOP_TOKENS + 1).ids, listed(p).ids)
