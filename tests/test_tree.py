"""Trees of tensors are walked as torch walks them, whatever they are made of."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from ppbench.base.tree import Recent, filled, finite, leaves, nbytes, node, structure, tree_map, values_digest

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
    ordered, defaults = named.map(OrderedDict), named.map(lambda result: defaultdict(list, result))
    nodes, pairs = both.map(lambda two: Both(*two)), both.map(lambda two: Pair(*two))
    return st.one_of(st.lists(children, max_size=3), both, named, ordered, defaults, nodes, pairs)


LEAVES = st.one_of(st.integers(0, 4).map(torch.arange), st.integers(), st.text(max_size=3), st.none())
TREES = st.recursive(LEAVES, branches, max_leaves=12)


def alike(one: object, two: object) -> bool:
    """Whether two trees have the same structure and leaves."""
    (mine, form), (theirs, other) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, theirs, strict=True)]
    return form == other and all(same)


def described(tree: object) -> object:
    """What torch says of a tree's structure, with shapes and dtypes of its tensors, and its other leaves."""
    result, form = pytree.tree_flatten(tree)
    return form, [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in result]


@given(TREES)
def test_trees_are_walked_as_torch_walks_them(tree):
    """States of ours, and what a plugin may keep beside: an `OrderedDict` of `state_dict`, a named tuple."""
    assert alike(tree_map(lambda leaf: leaf + 1, tree), pytree.tree_map_only(torch.Tensor, lambda leaf: leaf + 1, tree))
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert [id(leaf) for leaf in leaves(tree)] == [id(leaf) for leaf in tensors]
    assert nbytes(tree) == sum(leaf.nbytes for leaf in tensors)


@given(TREES, TREES)
@example(torch.arange(2), torch.arange(2.0))
@example(torch.ones(2, 1), torch.ones(1, 2))
@example({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)})
@example([torch.ones(1), 1], [torch.ones(1), 2])
@example((torch.ones(1),), [torch.ones(1)])
def test_trees_of_one_structure_differ_in_values_alone(tree, other):
    """Jobs are computed at once by it: those of other keys, kinds, shapes, dtypes or constants never are."""
    changed = filled(tree, [leaf + 1 for leaf in leaves(tree)])
    assert alike(changed, tree_map(lambda leaf: leaf + 1, tree))
    assert structure(changed) == structure(tree) and hash(structure(changed)) == hash(structure(tree))
    assert (structure(tree) == structure(other)) == (described(tree) == described(other))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_finite_is_said_of_each_number(value):
    """One entry that is none is found, opposite infinities too; numbers whose sum alone is too large are finite."""
    good = torch.full((4,), torch.finfo(torch.float32).max)
    bad = good.clone()
    bad[2] = value
    assert finite({"a": good, "b": (good * -1, torch.arange(3))}) and finite(())
    assert not finite({"a": good, "b": [bad]})
    assert not finite(torch.tensor([value, -value]))


def test_a_digest_is_of_names_shapes_and_values():
    tree = {"a": torch.tensor([0.1, 2.0]), "b": torch.ones(1)}
    assert values_digest(tree) == values_digest({name: value.double() for name, value in tree.items()})
    others = [{"b": tree["a"], "a": tree["b"]}, {**tree, "a": tree["a"][None]}, {**tree, "a": torch.tensor([0.1, 2.1])}]
    digests = [values_digest(*trees) for trees in ([tree], [tree, {}], *([other] for other in others))]
    assert len({*digests}) == len(digests)


def test_only_the_last_results_are_kept_and_used():
    recent, made = Recent(2), []
    for key in ("a", "b", "a", "c", "a", "b"):
        assert recent.of(key, lambda key=key: made.append(key) or key.upper()) == key.upper()
    assert made == ["a", "b", "c", "b"]
