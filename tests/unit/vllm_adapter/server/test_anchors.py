"""The anchor map: what the workers read, as positions of tokens by layer and KV head."""

from typing import Any

from vllm_antkv.vllm_adapter.server.anchors import AnchorMap, Anchors

NUM_LAYERS, NUM_BLOCKS = 2, 2


def worker(first_head: int, num_heads: int) -> list[Any]:
    """[layer][block][head][kind][row]: offsets that tell where they are; the last row is unused."""
    heads = range(first_head, first_head + num_heads)
    return [
        [
            [[[100 * kind + 20 * layer + head + 8, block, -1] for kind in range(2)] for head in heads]
            for block in range(NUM_BLOCKS)
        ]
        for layer in range(NUM_LAYERS)
    ]


def answer(*workers: list[Any], prompt: int = 7) -> dict[str, Any]:
    """What an engine core answers to `antkv_anchors`."""
    shown = {"prompt": prompt, "first_block": 4, "blocks": NUM_BLOCKS, "token_ids": None}
    return {"prompts": [{"prompt": prompt, "blocks": 9, "running": True}], "map": {**shown, "workers": list(workers)}}


def no_text(token_ids: list[int]) -> str:
    raise AssertionError("nobody allowed text")


def map_of(*workers: list[Any], num_kv_heads: int) -> AnchorMap:
    return Anchors.of({0: answer(*workers)}, None, num_kv_heads, no_text).map


def test_offsets_become_positions_in_order():
    found = map_of(worker(0, 2), num_kv_heads=2)
    assert (found.first_token, found.tokens) == (512, 256)
    assert found.k[1][0] == [512, 540, 641, 668]
    assert found.v[0][1] == [512, 621, 641, 749]
    assert found.text is None


def test_heads_of_tensor_parallel_workers_stand_side_by_side():
    assert map_of(worker(0, 1), worker(1, 1), num_kv_heads=2) == map_of(worker(0, 2), num_kv_heads=2)


def test_a_head_that_workers_share_is_shown_once():
    shared = map_of(worker(0, 1), worker(0, 1), worker(1, 1), worker(1, 1), num_kv_heads=2)
    assert shared == map_of(worker(0, 2), num_kv_heads=2)


def test_prompts_of_all_engines_are_listed_and_one_is_shown():
    engines = {0: {"prompts": [], "map": None}, 3: answer(worker(0, 1), prompt=5), 4: answer(worker(0, 1), prompt=2)}
    first, chosen, gone = (Anchors.of(engines, engine, 1, no_text) for engine in (None, 4, 0))
    assert [(each.engine, each.prompt, each.tokens) for each in first.prompts] == [(3, 5, 1152), (4, 2, 1152)]
    assert (first.map.engine, first.map.prompt) == (3, 5)
    assert (chosen.map.engine, chosen.map.prompt) == (4, 2)
    assert gone.map is None
