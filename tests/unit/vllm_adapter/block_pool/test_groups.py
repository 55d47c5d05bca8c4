"""Layers of one kind share block tables: no block is larger for it, and none is left that another has room for."""

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec

from tests.recency_spec import made_spec
from vllm_antkv.cache.pages import page_layouts
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import LAYER_PRESETS
from vllm_antkv.vllm_adapter.block_pool.groups import regrouped
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec, vq_spec

presets = st.sampled_from(list(LAYER_PRESETS.values()))
windows = st.sampled_from([None, 512, 4096])


def specs_of(layers: list[tuple]) -> dict[str, KVCacheSpec]:
    """VQ pages of layers, each of a preset and with a window; and recency pages."""
    layouts = page_layouts(AntKVConfig(), [preset for preset, _ in layers], 64, torch.bfloat16)
    specs: dict[str, KVCacheSpec] = {}
    for index, (layout, (_, window)) in enumerate(zip(layouts, layers, strict=True)):
        specs[str(index)] = vq_spec(layout, 1, window)
        specs[f"{index}.recent"] = made_spec(layout.recency_block_size, layout.recency_page_bytes, window=window)
    return specs


def kind(spec: KVCacheSpec) -> tuple:
    return type(spec), spec.window if isinstance(spec, RecencySpec) else getattr(spec, "sliding_window", None)


@given(layers=st.lists(st.tuples(presets, windows), min_size=1, max_size=12))
@settings(max_examples=60)
def test_every_layer_has_one_group_of_its_kind_and_no_two_groups_fit_into_one_block(layers):
    specs = specs_of(layers)
    whole = [name for name, spec in specs.items() if not isinstance(spec, SlidingWindowSpec)]
    others = [KVCacheGroupSpec([name], spec) for name, spec in specs.items() if name not in whole]
    groups = regrouped([*([KVCacheGroupSpec(whole, specs[whole[0]])] if whole else []), *others], specs)
    assert sorted(chain.from_iterable(group.layer_names for group in groups)) == sorted(specs)

    sizes: dict[tuple, list[int]] = {}
    for group in groups:
        (found,) = {kind(specs[name]) for name in group.layer_names}
        assert group.layer_names == [name for name in specs if name in group.layer_names]
        sizes.setdefault(found, []).append(sum(specs[name].page_size_bytes for name in group.layer_names))
    of_whole = sum(specs[name].page_size_bytes for name in whole)
    block = max(map(max, sizes.values()))
    if whole:
        assert block == max(of_whole, *(spec.page_size_bytes for spec in specs.values()))
    else:
        assert all(len(of_kind) == 1 for of_kind in sizes.values())
    for of_kind in sizes.values():
        assert len(of_kind) == 1 or sum(sorted(of_kind)[:2]) > min(block, of_whole)
