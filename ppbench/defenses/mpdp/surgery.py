"""The transform of a network's graph (torch.fx) that inserts MP-DP's transitional layers; see `expansion.py`."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ppbench.nets.commuting import TRANSITIONAL
from ppbench.nets.net import Classifier, Net
from ppbench.nets.walk import traced_features

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d)
SCALED_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
ACTIVATION_FUNCTIONS: set[Any] = {F.relu, torch.relu, F.leaky_relu}
ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add}


def transformed(net: Net, ahead_of_head: bool) -> tuple[Net, dict[str, tuple[int, ...]]]:
    """Return `net` with transitional layers, and their shapes by parameter."""
    surgery = _Surgery(traced_features(net))
    for node in list(surgery.module.graph.nodes):
        surgery.visit(node)
    for node in list(surgery.module.graph.nodes):
        if _is_addition(node):
            surgery.bridge(node)
        if node.op == "output" and ahead_of_head and node.args[0] in surgery.scaled:
            surgery.ahead(node.args[0], node)
    surgery.module.graph.lint()
    surgery.module.recompile()
    made = Net(net.spec, Classifier(surgery.module, net.module.head))
    return made, {f"features.{name}": shape for name, shape in surgery.shapes.items()}


class _Surgery:
    """Inserts multiplications by free-standing parameters into a graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.scaled: set[fx.Node] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def visit(self, node: fx.Node) -> None:
        """Record whether a node's channels are scaled, and insert a transitional layer after a scaled activation."""
        inputs = set(node.all_input_nodes)
        if not (self.scaled & inputs or self._affine(node)):
            return
        self.scaled.add(node)
        if not self._activation(node):
            return
        with self.module.graph.inserting_after(node):
            factor = self._parameter(node)
        with self.module.graph.inserting_after(factor):
            made = self.module.graph.call_function(operator.mul, (node, factor))
        node.replace_all_uses_with(made, lambda user: user is not made)
        self._like(made, node)

    def bridge(self, addition: fx.Node) -> None:
        """Insert a transitional layer at the start of every shortcut that ends in `addition`."""
        for operand in list(addition.all_input_nodes):
            start, reader = operand, addition
            while len(start.users) == 1 and len(start.all_input_nodes) == 1 and not self._affine(start):
                start, reader = start.all_input_nodes[0], start
            if start in self.scaled and not self._branch(operand):
                self.ahead(start, reader)

    def ahead(self, value: fx.Node, reader: fx.Node) -> None:
        """Insert a transitional layer between `value` and one node that reads it."""
        with self.module.graph.inserting_before(reader):
            made = self.module.graph.call_function(operator.mul, (value, self._parameter(value)))
        reader.replace_input_with(value, made)
        self._like(made, value)

    def _branch(self, node: fx.Node) -> bool:
        """Return whether a layer with weights lies between `node` and the last fork before it."""
        if len(node.users) != 1:
            return False
        return self._affine(node) or any(self._branch(before) for before in node.all_input_nodes)

    def _parameter(self, node: fx.Node) -> fx.Node:
        shape = node.meta["tensor_meta"].shape
        name, size = f"{TRANSITIONAL}{len(self.shapes)}", (shape[1], *[1] * (len(shape) - 2))
        self.module.register_parameter(name, nn.Parameter(torch.empty(size, device="meta")))
        self.shapes[name] = size
        return self.module.graph.get_attr(name)

    def _like(self, made: fx.Node, node: fx.Node) -> None:
        made.meta["tensor_meta"] = node.meta["tensor_meta"]
        self.scaled.add(made)

    def _layer(self, node: fx.Node) -> Any:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _affine(self, node: fx.Node) -> bool:
        return isinstance(self._layer(node), AFFINE)

    def _activation(self, node: fx.Node) -> bool:
        if node.op == "call_function":
            return node.target in ACTIVATION_FUNCTIONS
        return isinstance(self._layer(node), SCALED_ACTIVATIONS) or (node.op == "call_method" and node.target == "relu")


def _is_addition(node: fx.Node) -> bool:
    targets: dict[str, set[Any]] = {"call_function": ADDITIONS, "call_method": {"add"}}
    return node.target in targets.get(node.op, ()) and len(node.all_input_nodes) == 2
