"""The page allocator: no page in two hands unless shared, none lost, equal contents found again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.generate.pages import ROOT, PageAllocator


@settings(max_examples=60)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["new", "share", "release", "reset"]), st.integers(0, 5)), max_size=60)
)
def test_pages_are_neither_lost_nor_given_twice(actions):
    allocator = PageAllocator(8)
    held: list[int] = []
    for action, content in actions:
        if action == "new" and allocator.num_free:
            page = allocator.allocate()
            assert page not in held
            held.append(page)
            allocator.register(page, ROOT, (content,))
        elif action == "share" and (found := allocator.share(ROOT, (content,))):
            held.append(found[0])
        elif action == "release" and held:
            allocator.release(held.pop(content % len(held)))
        elif action == "reset":
            allocator.reset()
            held = []
        assert allocator.num_free == 8 - len(set(held))
        assert [allocator.ref_counts[p] for p in range(8)] == [held.count(p) for p in range(8)]
    for page in held:
        allocator.release(page)
    assert allocator.num_free == 8


def test_a_released_page_is_found_again_until_its_place_is_needed():
    allocator = PageAllocator(2)
    first, second = allocator.allocate(), allocator.allocate()
    chain = allocator.register(first, ROOT, (1, 2))
    allocator.register(second, chain, (3, 4))
    allocator.release(second)
    allocator.release(first)
    assert allocator.share(ROOT, (1, 2)) == (first, chain)
    assert allocator.share(ROOT, (3, 4)) is None, "another chain"
    assert allocator.allocate() == second
    assert allocator.share(chain, (3, 4)) is None, "its place was needed"
    with pytest.raises(IndexError):
        allocator.allocate()
