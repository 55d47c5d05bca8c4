"""Which layers share a block table: as many of one kind as a block of the pool has room for."""

from collections.abc import Mapping, Sequence

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec, WindowSpec

#: What layers of a group share: the class of pages, the window, and whether they belong to a model that drafts.
_Kind = tuple[type[KVCacheSpec], int | None, bool]


def regrouped(groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Few groups of recency pages, and of VQ pages of layers with a window.

    A block of the pool has the bytes of the largest group. vLLM makes groups of layers whose pages have one size, of
    which small ones leave most of their blocks empty, and splits recency pages where other pages have several sizes.

    Args:
        groups: vLLM's own.
        specs: of each layer, by its name.
    """
    kept: list[KVCacheGroupSpec] = []
    pages: dict[_Kind, dict[str, int]] = {}
    for group in groups:
        sizes = {name: specs[name].page_size_bytes for name in group.layer_names}
        kind = _kind(specs[group.layer_names[0]], group.is_eagle_group)
        if kind is None:
            kept.append(group)
        else:
            pages.setdefault(kind, {}).update(sizes)
    room = _room([group.layer_names for group in kept], specs) or max(sum(sizes.values()) for sizes in pages.values())
    for (_, _, is_eagle), sizes in pages.items():
        for names in _packed(sizes, max(room, *sizes.values())):
            # In the order of the layers.
            members = {name: specs[name] for name in specs if name in names}
            spec = UniformTypeKVCacheSpecs(block_size=specs[names[0]].block_size, kv_cache_specs=members)
            kept.append(KVCacheGroupSpec(list(members), spec, is_eagle_group=is_eagle))
    return kept


def _kind(spec: KVCacheSpec, is_eagle: bool) -> _Kind | None:
    """None for pages that stay in vLLM's groups."""
    if isinstance(spec, RecencySpec):
        return RecencySpec, spec.window, is_eagle
    if isinstance(spec, WindowSpec):
        return WindowSpec, spec.sliding_window, is_eagle
    return None


def _room(groups: Sequence[Sequence[str]], specs: Mapping[str, KVCacheSpec]) -> int:
    """Bytes of the largest of these groups; 0 where all layers have windows, so that those of one can be together."""
    whole = [names for names in groups if not isinstance(specs[names[0]], SlidingWindowSpec)]
    return max((sum(specs[name].page_size_bytes for name in names) for names in whole), default=0)


def _packed(pages: Mapping[str, int], room: int) -> list[list[str]]:
    """Names of pages that fit into the room together: the largest first, each where it fits first.

    pages: bytes by name, none more than the room.
    """
    packed: list[list[str]] = []
    for name in sorted(pages, key=pages.__getitem__, reverse=True):
        fitting = (names for names in packed if sum(map(pages.__getitem__, names)) + pages[name] <= room)
        if (names := next(fitting, None)) is None:
            packed.append(names := [])
        names.append(name)
    return packed
