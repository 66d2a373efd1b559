"""Trees of tensors are walked as torch walks them, whatever they are made of."""

from collections import OrderedDict, defaultdict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from ppbench.base.tree import leaves, nbytes, node, tree_map

Pair = namedtuple("Pair", ["one", "two"])


@node
class Both:
    """A state of two trees."""

    here: object
    there: object


def branches(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Trees of some trees."""
    named = st.dictionaries(st.sampled_from("abcd"), children, max_size=3)
    both = st.tuples(children, children)
    ordered, defaults = named.map(OrderedDict), named.map(lambda found: defaultdict(list, found))
    nodes, pairs = both.map(lambda two: Both(*two)), both.map(lambda two: Pair(*two))
    return st.one_of(st.lists(children, max_size=3), both, named, ordered, defaults, nodes, pairs)


LEAVES = st.one_of(st.integers(0, 4).map(torch.arange), st.integers(), st.text(max_size=3), st.none())


def alike(one: object, two: object) -> bool:
    """Whether two trees have the same structure and leaves."""
    (mine, form), (theirs, other) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, theirs, strict=True)]
    return form == other and all(same)


@given(st.recursive(LEAVES, branches, max_leaves=12))
def test_trees_are_walked_as_torch_walks_them(tree):
    """States of ours, and what a plugin may keep beside: an `OrderedDict` of `state_dict`, a named tuple."""
    assert alike(tree_map(lambda leaf: leaf + 1, tree), pytree.tree_map_only(torch.Tensor, lambda leaf: leaf + 1, tree))
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert [id(leaf) for leaf in leaves(tree)] == [id(leaf) for leaf in tensors]
    assert nbytes(tree) == sum(leaf.nbytes for leaf in tensors)
