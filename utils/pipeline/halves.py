"""The backward pass in two halves: the input's gradient first, the weights' gradients later.

In the graph that autograd has recorded, some nodes lead to the input: the *trunk*. A layer with
weights is a node of the trunk with *branches*, which lead to weights only. The input half runs the
trunk and notes what comes to each such node; the weight half goes on from there into the branches.
No product is computed twice.

What it costs: the graph, with all it has saved, and the gradient of each layer's output stay in
memory until the weight half. An operation that works out several gradients at once from the same
sums, such as a normalisation, forms these sums in both halves. A weight that several nodes of the
trunk use themselves cannot wait: its gradient is found in the input half.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Branches = dict[Node, list[GradientEdge]]  # by the node of the trunk from which they go


def input_half(output: Tensor, gradient: Tensor | None, x: Tensor) -> tuple:
    """The gradient of x, and a function to call later that adds those of the weights.

    `gradient` is that of `output`, None for a loss. If the output does not depend on x, its
    gradient is None.
    """
    leaf = get_gradient_edge(x).node
    trunk = nodes_between(get_gradient_edge(output).node, leaf)
    if trunk == {leaf} and output is not x:
        return None, partial(torch.autograd.backward, output, gradient)
    branches, early = split_branches(trunk)
    noted: list[tuple] = []
    hooks = [
        node.register_prehook(lambda came, node=node: noted.append((came, node)))
        for node, edges in branches.items()
        if edges
    ]
    inputs = [x, *(node.variable for node in early)]
    found, *others = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    edges = [GradientEdge(node, 0) for node in early]
    return found, partial(weight_half, noted, branches, edges, others)


def weight_half(noted: list, branches: Branches, edges: list, gradients: list) -> None:
    """Go from each noted node into its branches, then from all of these down to the weights.

    `edges` and `gradients` are what the input half has found already.
    """
    for came, node in noted:
        outputs = [GradientEdge(node, i) for i, g in enumerate(came) if g is not None]
        came = [g for g in came if g is not None]
        edges += branches[node]
        gradients += torch.autograd.grad(outputs, branches[node], came)
    torch.autograd.backward(edges, gradients)


def split_branches(trunk: set[Node]) -> tuple[Branches, list[Node]]:
    """The branches that can wait, and the weights (`AccumulateGrad` nodes) that cannot.

    To go into a branch again from one node of the trunk must not lead through others. It would if
    another one used the same node, and so would anything that ends in the same weights as those.
    """
    branches = {
        node: [GradientEdge(*edge) for edge in dict.fromkeys(node.next_functions)
               if edge[0] is not None and edge[0] not in trunk]
        for node in trunk
    }  # fmt: skip
    below = {edge.node: nodes_below(edge.node) for edges in branches.values() for edge in edges}
    users = Counter()
    for edges in branches.values():
        users.update(set().union(*(below[edge.node] for edge in edges)))
    early: set[Node] = set()
    more = {node for node in below if users[node] > 1}
    while more:
        early |= {leaf for node in more for leaf in weights_among(below[node])}
        more = {n for n, nodes in below.items() if nodes & early and weights_among(nodes) - early}
    waiting = {
        node: [edge for edge in edges if not below[edge.node] & early]
        for node, edges in branches.items()
    }
    return waiting, list(early)


def nodes_below(root: Node) -> set[Node]:
    """A node and all that a gradient passes after it."""
    found, todo = {root}, [root]
    for node in todo:  # grows while it is walked
        new = {child for child, _ in node.next_functions if child is not None} - found
        found |= new
        todo += new
    return found


def nodes_between(root: Node, leaf: Node) -> set[Node]:
    """The nodes that a gradient passes on its way from `root` to `leaf`, and `leaf` itself."""
    parents: dict[Node, list[Node]] = {}
    for node in nodes_below(root):
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    found, todo = {leaf}, [leaf]
    for node in todo:
        new = set(parents.get(node, [])) - found
        found |= new
        todo += new
    return found


def weights_among(nodes: set[Node]) -> set[Node]:
    """The nodes that add to a weight's gradient."""
    return {node for node in nodes if hasattr(node, "variable")}
